"""The API documentation of your own Python environment as a retrieval task.

Docstrings of the installed packages and of the standard library are parsed with :mod:`ast` and
griffe. No package is imported or run.

- A *query* is the summary of a public module, class, function or method, as a question that does
  not name the object.
- Its *relevant* documents are the chunks of the description: the paragraphs and notes after the
  summary.
- Its *negatives* are boilerplate: the chunks of its parameter, return, exception, see-also,
  reference and example sections. They belong to the right object but do not say what it is for, so
  they are never relevant.

Only objects with both kinds of chunks take part, and no chunk repeats its query. The split is by
package, and a docstring that resembles one of the test packages is kept out of the other splits.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.data.docstrings.objects import DocumentedObject, documented_objects, read_files
from benchmarks.data.docstrings.queries import normalised
from benchmarks.data.docstrings.sections import split_docstring
from benchmarks.data.docstrings.sources import environment_fingerprint, package_files

from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.files.pairs import load_splits

__all__ = [
    "DocstringTask",
    "DocumentedObject",
    "build_docstring_task",
    "documented_objects",
    "split_docstring",
]

_MINIMUM = {"train": 500, "dev": 100, "test": 200}  # queries; with fewer, a difference is noise
# import name to distribution name
_DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}
_PARSER = 2  # a cached task of another version of the parser is built again


@dataclass
class DocstringTask:
    """Three retrieval tasks over disjoint packages; negatives of ``test`` are all its
    never-relevant documents."""

    train: RetrievalData
    dev: RetrievalData  # for choices, such as that of the document exponent
    test: RetrievalData
    packages: dict[str, dict[str, int]]  # number of queries of each package, by split


def build_docstring_task(
    train: Sequence[str] | None = None,
    dev: Sequence[str] = ("pandas",),
    test: Sequence[str] = ("scipy", "networkx", "sklearn"),
    *,
    train_queries: int = 3400,
    dev_queries: int = 150,
    test_queries: int = 450,
    max_files: int = 160,
    max_train_files: int | None = None,
    seed: int = 0,
    roots: Sequence[str | Path] | None = None,
    cache: str | Path | None = None,
) -> DocstringTask:
    """Builds the task from the packages of this environment. The same environment and seed give the
    same task.

    Args:
        train: Packages to train on (import names; ``"stdlib"`` is the standard library); default:
            all others.
        dev: Packages for choosing hyperparameters.
        test: Packages for evaluation.
        train_queries, dev_queries, test_queries: Largest number of queries, drawn evenly from the
            packages.
        max_files: Largest number of files that are read of each package (a seeded sample).
        max_train_files: The same for training packages, of which there are many; default:
            ``max_files``.
        seed: Seed for all sampling.
        roots: Folders that hold packages; default: the running interpreter's site-packages and
            standard library.
        cache: Folder that keeps the task in BEIR's layout, for the same arguments and the same
            installed packages.

    Raises:
        DataError: If a package is not installed, or a split has too few queries.
    """
    sizes = {"test": test_queries, "dev": dev_queries, "train": train_queries}
    settings: dict[str, object] = {}
    if cache is not None:
        settings = {
            "packages": [train and [*train], [*dev], [*test]],
            "numbers": [*sizes.values(), max_files, max_train_files, seed, _PARSER],
            "environment": environment_fingerprint(roots),
        }
        if cached := _load(Path(cache), settings):
            return cached

    files = package_files(roots)
    if missing := [name for name in (*test, *dev, *(train or ())) if name not in files]:
        install = " ".join(sorted({_DISTRIBUTION.get(name, name) for name in missing}))
        raise DataError(
            f"No source files of {', '.join(missing)} were found among {len(files)} packages"
            f" ({', '.join(files) or 'the folders hold no package'}). Run pip install {install}, or"
            " name other packages."
        )
    if train is None:
        train = [name for name in files if name not in (*dev, *test)]
    # a near-duplicate belongs to the first of them
    packages = {"test": test, "dev": dev, "train": train}

    limits = dict.fromkeys(train, max_files if max_train_files is None else max_train_files)
    jobs = [
        (name, files[name][0], path)
        for name in (*test, *dev, *train)
        for path in _sample(files[name][1], limits.get(name, max_files), f"{seed} {name}")
    ]
    objects = _drop_duplicates(read_files(jobs))

    chosen = {
        split: _draw_evenly(split, names, objects, sizes[split], seed)
        for split, names in packages.items()
    }
    data = {split: _retrieval_data(found) for split, found in chosen.items()}
    counts = {
        split: dict(sorted(Counter(o.package for o in found).items()))
        for split, found in chosen.items()
    }
    task = DocstringTask(data["train"], data["dev"], data["test"], counts)
    if cache is not None:
        _save(task, Path(cache), settings)
    return task


def _sample(paths: list[Path], most: int, seed: str) -> list[Path]:
    return paths if len(paths) <= most else sorted(random.Random(seed).sample(paths, most))


# --------------------------------------------------------------------------------------------------
# From documented objects to retrieval data
# --------------------------------------------------------------------------------------------------


def _drop_duplicates(objects: Sequence[DocumentedObject]) -> list[DocumentedObject]:
    """Drops objects whose query or description repeats, or nearly repeats, that of an earlier
    object."""
    kept = list(objects)
    for texts in ([o.query for o in kept], [" ".join(o.relevant) for o in kept]):
        unlike = _unlike_earlier([frozenset(normalised(text).split()) for text in texts])
        duplicate = {id(o) for o, keep in zip(objects, unlike, strict=True) if not keep}
        kept = [o for o in kept if id(o) not in duplicate]
    return kept


def _unlike_earlier(sets: Sequence[frozenset[str]], threshold: float = 0.8) -> list[bool]:
    """For each set of words, whether its Jaccard similarity with each earlier kept set is below the
    threshold.

    Prefix filtering: if words are ordered by rarity, similar sets share one of the first ``n -
    ceil(t n) + 1`` words.
    """
    frequency = Counter(word for words in sets for word in words)
    with_prefix: dict[str, list[frozenset[str]]] = {}
    unlike: list[bool] = []
    for words in sets:
        ordered = sorted(words, key=lambda word: (frequency[word], word))
        prefix = ordered[: len(words) - math.ceil(threshold * len(words)) + 1]
        candidates = (other for word in prefix for other in with_prefix.get(word, ()))
        unlike.append(
            not any(len(words & other) >= threshold * len(words | other) for other in candidates)
        )
        if unlike[-1]:
            for word in prefix:
                with_prefix.setdefault(word, []).append(words)
    return unlike


def _draw_evenly(
    split: str, packages: Sequence[str], objects: Sequence[DocumentedObject], size: int, seed: int
) -> list[DocumentedObject]:
    """At most ``size`` objects, taken from the packages in turn, each package in a seeded order."""
    available = {name: [o for o in objects if o.package == name] for name in packages}
    rng = random.Random(seed)
    shuffled = [rng.sample(found, len(found)) for found in available.values()]
    chosen = [o for row in zip_longest(*shuffled) for o in row if o is not None][:size]
    minimum = min(_MINIMUM[split], size)
    if len(chosen) < minimum:
        counts = (
            ", ".join(f"{name} {len(found):,}" for name, found in available.items())
            or "no packages"
        )
        raise DataError(
            f"The {split} split needs {minimum} documented objects, but {len(chosen):,} were found"
            f' ({counts}). Run pip install ".[dev]", which installs enough packages, name more'
            " packages, or raise max_files."
        )
    return chosen


def _retrieval_data(objects: Sequence[DocumentedObject]) -> RetrievalData:
    """One query per object over the chunks of all objects.

    Equal chunks are one document, and a chunk that is relevant to any query is nobody's negative.
    """
    described = {chunk for o in objects for chunk in o.relevant}
    identifiers: dict[str, str] = {}
    queries: dict[str, str] = {}
    relevant: dict[str, set[str]] = {}
    negatives: dict[str, set[str]] = {}
    for o in objects:
        queries[o.name] = o.query
        chunks = (*o.relevant, *(chunk for chunk in o.boilerplate if chunk not in described))
        documents = [
            identifiers.setdefault(chunk, f"{o.name}#{i}") for i, chunk in enumerate(chunks)
        ]
        relevant[o.name] = set(documents[: len(o.relevant)])
        if len(documents) > len(o.relevant):
            negatives[o.name] = set(documents[len(o.relevant) :])
    return RetrievalData(
        queries, {key: chunk for chunk, key in identifiers.items()}, relevant, negatives
    )


# --------------------------------------------------------------------------------------------------
# Cache
# --------------------------------------------------------------------------------------------------


def _save(task: DocstringTask, folder: Path, settings: Mapping[str, object]) -> None:
    for split in ("train", "dev", "test"):
        getattr(task, split).save(folder / split, split)
    text = json.dumps({"settings": settings, "packages": task.packages}, indent=2)
    (folder / "task.json").write_text(text + "\n", encoding="utf-8")


def _load(folder: Path, settings: Mapping[str, object]) -> DocstringTask | None:
    """The task in the folder, if it was built with the same settings."""
    try:
        saved = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(saved, dict) or saved.get("settings") != settings or "packages" not in saved:
        return None
    train, dev, test = (load_splits(folder / split)[split] for split in ("train", "dev", "test"))
    return DocstringTask(train, dev, test, saved["packages"])
