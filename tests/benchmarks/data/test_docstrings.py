"""The docstrings of an environment as a retrieval task: queries, splits and sampling."""

import random
from pathlib import Path
from textwrap import indent

import pytest
from _texts import words
from benchmarks.data.docstrings import task as docstrings

from st_magnitude.data.retrieval import RetrievalData


def function(name: str, summary: str, description: str = "", parameters: str = "") -> str:
    description = description or "The description has enough words to be a chunk of its own here."
    parameters = parameters or "x: The only parameter, which has a sufficiently long explanation."
    text = f'"""{summary}\n\n{description}\n\nArgs:\n    {parameters}\n"""'
    return f"def {name}(x):\n{indent(text, '    ')}\n"


QUERIES = {
    "Returns the discrete spectrum of a signal.": "how do I get the discrete spectrum of a signal?",
    "The spectrum of a signal.": "what is the spectrum of a signal?",
    "fft: compute the spectrum of a signal.": "how do I compute the spectrum of a signal?",
    "Compute the spectrum (FFT) of a signal.": "how do I compute the spectrum of a signal?",
    "Apply the fft to all points.": None,  # it names the object
}


@pytest.mark.parametrize("summary", QUERIES)
def test_query(summary: str) -> None:
    found = [o.query for o in docstrings.documented_objects(function("fft", summary), "audio")]
    assert found == ([] if QUERIES[summary] is None else [QUERIES[summary]])


def write_package(root: Path, name: str, functions: int) -> None:
    """A package of functions without a common word, which cannot be imported."""
    rng = random.Random(name)
    texts = [
        (f"Compute {words(rng, 6)}.", f"{words(rng, 15)}.", f"x: {words(rng, 12)}")
        for _ in range(functions)
    ]
    sources = [function(f"f{i}", *text) for i, text in enumerate(texts)]
    (root / name).mkdir()
    text = "\n".join(["raise RuntimeError('imported')", *sources])
    (root / name / "__init__.py").write_text(text)


def test_task(tmp_path: Path) -> None:
    for name, functions in (("big", 20), ("small", 2), ("other", 5), ("dev", 5), ("exam", 6)):
        write_package(tmp_path, name, functions)
    sizes = {"train_queries": 6, "dev_queries": 3, "test_queries": 4}
    task = docstrings.build_docstring_task(None, ["dev"], ["exam"], roots=[tmp_path], **sizes)
    assert task.packages == {
        "train": {"big": 2, "other": 2, "small": 2},
        "dev": {"dev": 3},
        "test": {"exam": 4},
    }
    for split, size in (("train", 6), ("dev", 3), ("test", 4)):
        data: RetrievalData = getattr(task, split)
        assert len(data.queries) == size
        assert data.relevant.keys() == data.negatives.keys() == data.queries.keys()
        relevant, never = (set().union(*x.values()) for x in (data.relevant, data.negatives))
        assert relevant | never == data.corpus.keys()
        assert not relevant & never
    assert len(task.train.triplets(1)) == 6


def test_twins_and_near_duplicates_go() -> None:
    rng = random.Random(0)
    texts = [(f"Compute {words(rng, 6)}.", f"{words(rng, 15).capitalize()}.") for _ in range(4)]
    nearly = (texts[1][0].replace("Compute", "Compute here"), texts[1][1].replace(".", " and."))
    sources = "\n".join(
        function(f"f{i}", *text) for i, text in enumerate([*texts, texts[0], nearly])
    )
    kept = docstrings._drop_duplicates(list(docstrings.documented_objects(sources, "audio")))
    assert [o.name.rpartition(".")[2] for o in kept] == ["f0", "f1", "f2", "f3"]
