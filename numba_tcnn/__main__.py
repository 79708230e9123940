"""`python -m numba_tcnn` is the `numba-tcnn` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
