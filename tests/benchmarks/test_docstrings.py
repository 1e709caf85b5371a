"""The docstrings of an environment as a retrieval task: sections, queries, splits and sampling."""

import random
import sys
from pathlib import Path
from textwrap import indent

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from docstrings import task as docstrings
from docstrings.task import DocstringTask, build_docstring_task, documented_objects, split_docstring

from st_magnitude.data.retrieval import RetrievalData

NUMPYDOC = """Smooth a noisy recording, sample by sample.

Every sample becomes the mean of its neighbours, so that sharp edges are lost as well. See `sharpen` for details.

.. versionadded:: 1.2
   Also for two channels.

.. note::
    The recording is padded with zeros, which :func:`~audio.core.fade` hides.

.. deprecated:: 2.0
    Write something else instead of calling this.

Parameters
----------
signal : ndarray of shape (n,)
    The samples in the order of their time, in any unit.
args : tuple, optional
    Handed on to the window, in the order that it has.

Returns
-------
ndarray of shape (n,)
    The smoothed samples, in the unit of the signal.

See Also
--------
sharpen : The opposite, which brings out the edges again.

Notes
-----
The cost grows linearly with the length of the recording [1]_ and not at all with the width.

References
----------
.. [1] A. Author, "Running sums in constant time", Journal of Signals, 1981.

Examples
--------
>>> smooth(np.array([1.0, 2.0, 3.0]), width=3, mode="zero", axis=-1)
array([1., 2., 1.66666667])
"""


def test_numpydoc() -> None:
    summary, description, boilerplate = split_docstring(NUMPYDOC)
    assert summary == "Smooth a noisy recording, sample by sample."
    assert description == [
        "Every sample becomes the mean of its neighbours, so that sharp edges are lost as well. The recording is "
        "padded with zeros, which fade hides. The cost grows linearly with the length of the recording and not at all "
        "with the width."
    ]
    assert boilerplate == [
        "signal (ndarray of shape (n,)): The samples in the order of their time, in any unit. args (tuple): Handed on "
        "to the window, in the order that it has.",
        "ndarray of shape (n,): The smoothed samples, in the unit of the signal.",
        "sharpen : The opposite, which brings out the edges again.",
        '[1] A. Author, "Running sums in constant time", Journal of Signals, 1981.',
        'smooth(np.array([1.0, 2.0, 3.0]), width=3, mode="zero", axis=-1) array([1., 2., 1.66666667])',
    ]


def function(name: str, summary: str, description: str = "", parameters: str = "") -> str:
    description = description or "The description has enough words to be a chunk of its own here."
    parameters = parameters or "x: The only parameter, which has a sufficiently long explanation."
    text = f'"""{summary}\n\n{description}\n\nArgs:\n    {parameters}\n"""'
    return f"def {name}(x):\n{indent(text, '    ')}\n"


@pytest.mark.parametrize(
    ("name", "summary", "query"),
    [
        ("fft", "Returns the discrete spectrum of a signal.", "how do I get the discrete spectrum of a signal?"),
        ("fft", "Processes the spectrum of a signal.", "how do I process the spectrum of a signal?"),
        ("is_flat", "Return True if the spectrum is constant.", "how do I check whether the spectrum is constant?"),
        ("fft", "The discrete spectrum of a signal.", "what is the discrete spectrum of a signal?"),
        ("fft", "Fast spectrum of a signal.", "fast spectrum of a signal"),
        ("fft", "FIR filter of a signal.", "FIR filter of a signal"),
        ("fft", "fft: compute the spectrum of a signal.", "how do I compute the spectrum of a signal?"),
        ("KMeans", "K-Means is a clustering around centres.", "what is a clustering around centres?"),
        ("rfft", "Compute the spectrum (RFFT) of a signal.", "how do I compute the spectrum of a signal?"),
        ("KMeans", "Fit the k-means of all points.", None),
        ("train_test_split", "Make a train test split of arrays.", None),
        ("fft", "Compute the FFT of a signal.", None),
        ("fft", "See the other spectrum function.", None),
        ("fft", "Deprecated spectrum of a signal.", None),
        ("fft", "spectrum(x, n) -> the spectrum of a signal", None),
    ],
)
def test_query(name: str, summary: str, query: str | None) -> None:
    found = [o.query for o in documented_objects(function(name, summary), "audio")]
    assert found == ([] if query is None else [query])


SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


def words(rng: random.Random, number: int) -> str:
    return " ".join("".join(rng.sample(SYLLABLES, 3)) for _ in range(number))


def write_package(root: Path, name: str, functions: int, seed: int = 0) -> Path:
    """Writes a package of ``functions`` functions without a common word. It cannot be imported."""
    rng = random.Random(f"{name} {seed}")
    (root / name).mkdir(parents=True)
    (root / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for i in range(functions):
        summary, description = f"Compute {words(rng, 6)}.", f"{words(rng, 15).capitalize()}."
        source = function(f"f{i}", summary, description, f"x: {words(rng, 12)}")
        (root / name / f"_module{i}.py").write_text(f"raise RuntimeError('imported')\n{source}")
    return root


def build(root: Path, **arguments: object) -> DocstringTask:
    settings = {"dev": "dev", "test": ["exam"], "train_queries": 6, "dev_queries": 3, "test_queries": 4}
    return build_docstring_task(roots=[root], progress=False, **(settings | arguments))  # type: ignore[arg-type]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    for name, functions in (("big", 20), ("small", 2), ("other", 5), ("dev", 5), ("exam", 6)):
        write_package(tmp_path, name, functions)
    return tmp_path


def test_task(environment: Path) -> None:
    task = build(environment)
    assert task.packages == {"train": {"big": 2, "other": 2, "small": 2}, "dev": {"dev": 3}, "test": {"exam": 4}}
    for split, size in (("train", 6), ("dev", 3), ("test", 4)):
        data: RetrievalData = getattr(task, split)
        assert len(data.queries) == size
        assert data.relevant.keys() == data.negatives.keys() == data.queries.keys()
        relevant, never = (set().union(*judged.values()) for judged in (data.relevant, data.negatives))
        assert relevant | never == data.corpus.keys()  # every never-relevant chunk is some query's negative
        assert not relevant & never
    assert len(task.train.triplets(1)) == 6
    assert build(environment, train=["other"], train_queries=4).packages["train"] == {"other": 4}


@pytest.fixture
def no_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "_MINIMUM", {"train": 0, "dev": 0, "test": 0})


@pytest.mark.usefixtures("no_minimum")
def test_twins_and_near_duplicates_go(tmp_path: Path) -> None:
    write_package(tmp_path, "big", 6)
    write_package(tmp_path, "dev", 3)
    write_package(tmp_path, "exam", 5)
    for name in ("_module0.py", "_module1.py"):  # a test object's twin, and one with a word more, in a training package
        source = (tmp_path / "exam" / name).read_text()
        if name == "_module1.py":
            source = source.replace("Compute", "Compute here").replace(".\n\n    Args", " and.\n\n    Args")
        (tmp_path / "big" / f"copy{name}").write_text(source)
    (tmp_path / "exam" / "_module9.py").write_text((tmp_path / "exam" / "_module0.py").read_text())
    task = build(tmp_path, test_queries=100, train_queries=100)
    assert len(task.test.queries) == 5
    assert len(task.train.queries) == 6
    assert not any("copy" in name for name in task.train.queries)
