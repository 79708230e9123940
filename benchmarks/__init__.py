"""Measurements on a GPU, run from the checkout: `python -m benchmarks.ledger_rows`, `python -m benchmarks.plans`."""
