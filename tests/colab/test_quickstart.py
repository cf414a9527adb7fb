"""The notebook runs from its first cell to its last, on a tiny configuration."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "colab" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    [parameters] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source = f'STEPS, EVAL_TASKS, BATCH = 2, 4, 8\nRUN = r"{tmp_path / "run"}"'
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    texts = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in text for text in texts)
    assert any("exact" in text and "oracle" in text for text in texts)
    assert any("true answer:" in text for text in texts)


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
