"""From Python source files to documented objects: a query, its relevant chunks and its boilerplate.

Files are parsed with :mod:`ast`; nothing is imported or run.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data.docstrings.queries import as_query, normalised, query_core
from benchmarks.data.docstrings.sections import MIN_WORDS, first_sentence, split_docstring
from benchmarks.data.docstrings.sources import is_public
from tqdm import tqdm

__all__ = ["DocumentedObject", "documented_objects", "read_files"]


@dataclass(frozen=True)
class DocumentedObject:
    """The parts of one docstring that the task uses."""

    name: str  # qualified, such as scipy.optimize._minimize.minimize
    query: str  # the summary as a question
    relevant: tuple[str, ...]  # chunks of the description
    boilerplate: tuple[str, ...]  # chunks of the other sections

    @property
    def package(self) -> str:
        """The top-level package, or ``"stdlib"``."""
        return self.name.partition(".")[0]


_MAX_RELEVANT, _MAX_BOILERPLATE = 3, 5  # chunks of one object
_MIN_JOBS_FOR_POOL = 100
_HAS_SECTIONS = re.compile(
    rb">>> |^ *(?::(?:param|arg|return|raise)|(?:Parameter|Arg|Return|Example|Raise|Refer)\w*:?$)",
    re.M,
)
_NOT_PARSED = re.compile(  # templates of docstrings, and Epydoc's fields
    r"%\(\w+\)s|\{\{|(?<![\\\w}^_$"
    r" {'\"])\{[a-z_]+\}|^\{\w+\}$|^\s*@(?:param|type|return|rtype|raise)\b",
    re.M,
)


def read_files(jobs: Sequence[tuple[str, Path, Path]]) -> list[DocumentedObject]:
    """The documented objects of all files, in the order of the files."""
    bar: Any = {"total": len(jobs), "desc": "Reading docstrings", "unit": "file", "disable": None}
    if sys.platform != "linux" or len(jobs) < _MIN_JOBS_FOR_POOL:
        return [found for objects in tqdm(map(_read_file, jobs), **bar) for found in objects]
    with warnings.catch_warnings():
        # a fork while torch has threads: children only parse
        warnings.simplefilter("ignore", DeprecationWarning)
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
            results = pool.map(_read_file, jobs, chunksize=16)
            return [found for objects in tqdm(results, **bar) for found in objects]


def _read_file(job: tuple[str, Path, Path]) -> list[DocumentedObject]:
    package, root, path = job
    parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
    try:
        source = path.read_bytes()
        if not _HAS_SECTIONS.search(source):  # saves parsing half of the files
            return []
        return list(documented_objects(source, ".".join(parts), package))
    except (SyntaxError, ValueError, RecursionError, OSError):  # another Python, a template
        return []


def documented_objects(
    source: str | bytes, module: str, package: str | None = None
) -> Iterator[DocumentedObject]:
    """The public objects of a module that have a query, a description and boilerplate.

    Example:
        >>> source = '''
        ... def smooth(signal, width):
        ...     \"\"\"Remove noise from a noisy recording.
        ...
        ...     Every sample becomes the mean of the samples around it, and sharp edges are lost.
        ...
        ...     Args:
        ...         signal: The samples, of shape (n,), in order of their time.
        ...         width: Their number.
        ...     \"\"\"
        ... '''
        >>> for found in documented_objects(source, "audio"):
        ...     print(found.name, found.query, found.relevant, found.boilerplate, sep="\\n")
        audio.smooth
        how do I remove noise from a noisy recording?
        ('Every sample becomes the mean of the samples around it, and sharp edges are lost.',)
        ('signal: The samples, of shape (n,), in order of their time. width: Their number.',)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)
    top = package or module.partition(".")[0]
    prefix = module if module.partition(".")[0] == top else f"{top}.{module}"
    for name, node in _public_nodes(tree, prefix):
        docstring = ast.get_docstring(node, clean=False)
        if (
            docstring is None
            or len(docstring.split()) < 2 * MIN_WORDS
            or _NOT_PARSED.search(docstring)
        ):
            continue
        docstring = inspect.cleandoc(docstring)
        query = as_query(first_sentence(docstring), name.rpartition(".")[2])
        if query is None:
            continue
        _, description, boilerplate = split_docstring(docstring)
        core = query_core(query)
        relevant = tuple(chunk for chunk in description if core not in normalised(chunk))[
            :_MAX_RELEVANT
        ]
        never = tuple(chunk for chunk in boilerplate if core not in normalised(chunk))[
            :_MAX_BOILERPLATE
        ]
        if relevant and never:
            yield DocumentedObject(name, query, relevant, never)


def _public_nodes(
    node: ast.Module | ast.ClassDef, name: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    yield name, node
    for child in node.body:
        if not isinstance(
            child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) or not is_public(child.name):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _public_nodes(child, f"{name}.{child.name}")
        else:
            yield f"{name}.{child.name}", child
