"""The notebooks: script and notebook are the same, outputs are there, and the script runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NAMES = ("fused_against_reference", "learn_an_image")


def test_no_notebook_is_forgotten():
    for suffix in (".py", ".ipynb"):
        assert sorted(path.stem for path in FOLDER.glob(f"*{suffix}")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_have_the_same_cells(name):
    script = jupytext.read(FOLDER / f"{name}.py")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_carries_its_outputs(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_script_runs(name, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_TCNN_SMALL_NOTEBOOKS", "1")
    notebook = jupytext.read(FOLDER / f"{name}.py")
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) >= 4
