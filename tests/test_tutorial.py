"""The tutorial notebook runs from top to bottom, shortened, and its outputs fit a web page."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
SHORTER = {"train_queries=300": 40, "dev_queries=100": 30, "test_queries=150": 30}
SHORTER |= {"max_files=120": 40, "max_train_files=400": 60, "max_steps=20": 2}


def test_committed_outputs():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(?:home|root|tmp|work|usr|Users)/|[A-Z]:\\\\", text)  # of a machine
    cells = nbformat.reads(text, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)


@pytest.mark.slow
@pytest.mark.usefixtures("minilm_path")
def test_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("faiss")
    root = NOTEBOOK.parents[1]
    monkeypatch.setenv("PYTHONPATH", str(root))
    text = NOTEBOOK.read_text(encoding="utf-8")
    for given, number in SHORTER.items():
        assert given in text
        text = text.replace(given, f"{given.partition('=')[0]}={number}")
    notebook = nbformat.reads(text, as_version=4)
    options = {"timeout": 600, "kernel_name": "python3"}
    options["resources"] = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, **options).execute()  # raises the error of a cell
    assert (tmp_path / "runs" / "tutorial-model" / "modules.json").exists()
