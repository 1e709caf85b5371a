"""Documents from files of text, Markdown and source code, and from JSON lines."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from st_magnitude.data.beir import json_lines

__all__ = ["Documents", "iterate_documents", "read_documents"]

_PROSE = frozenset({".md", ".markdown", ".txt", ".text", ".rst"})
_JSONL = frozenset({".jsonl", ".ndjson"})
_LANGUAGES = """
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cs .java .kt .kts .scala .groovy .go .rs .swift .js .jsx .mjs .cjs .ts
    .tsx .php .rb .pl .pm .lua .r .jl .m .mm .sh .bash .zsh .ps1 .sql .hs .ml .mli .fs .ex .exs .erl .clj .lisp .el
    .dart .f90 .f .asm .s .cu .cuh .proto .zig .nim .v .vhd .tcl
"""
_CODE = frozenset(_LANGUAGES.split())
_READ = _PROSE | _JSONL | _CODE

Documents = str | Path | Iterable[str | Mapping[str, Any]]


def read_documents(path: str | Path) -> Iterator[dict[str, Any]]:
    """Reads a text file, a JSONL file, or all of those in a folder and its subfolders, sorted by name.

    - ``.txt``, ``.rst``, ``.md`` and source code: one document per file.
    - ``.jsonl``: one document per line, with the key ``text`` and optionally ``code`` (whether it is source code).

    Hidden files and folders, files with other suffixes and blank texts are left out. A folder's files that are not
    UTF-8 text are left out with a warning; such a file given by itself is an error. For HTML, PDF and other formats,
    convert to Markdown or JSONL first, with pandoc or trafilatura for example.

    Args:
        path: A file or a folder.

    Yields:
        Documents with ``text`` and ``code``, one by one: a folder may be larger than the memory.

    Raises:
        FileNotFoundError: If there is no such file or folder, or the folder holds no file of these kinds.
        ValueError: If a file is not UTF-8 text, or a line of a JSONL file is malformed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "tea.md").write_text("# Tea\\nBoil water.\\n")
        >>> list(read_documents(folder))
        [{'text': '# Tea\\nBoil water.\\n', 'code': False}]
    """
    path = Path(path)
    if path.is_file():
        yield from _read_file(path)
        return
    files = (file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in _READ and file.is_file())
    names = sorted(name for name in files if not any(part.startswith(".") for part in name.parts))
    if not names:
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder with files of text, Markdown, JSONL or source code. To use "
            "a text itself as a document, put it in a list: [text]."
        )
    skipped = []
    for name in names:
        try:
            yield from _read_file(path / name)
        except _NotTextError:
            skipped.append(name)
    if skipped:
        warnings.warn(
            f"Left out {len(skipped):,} files of {path} that are not UTF-8 text, such as {skipped[0]}.", stacklevel=2
        )


class _NotTextError(ValueError):
    pass


def _read_file(path: Path) -> Iterator[dict[str, Any]]:
    suffix = path.suffix.lower()
    if suffix in _JSONL:
        rows = (_document(row, where) for where, row in json_lines(path))
        yield from (row for row in rows if row["text"].strip())
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # line ends become "\n"
    except UnicodeDecodeError as error:
        raise _NotTextError(f"{path} is not UTF-8 text ({error}); convert it.") from None
    if "\0" in text:
        raise _NotTextError(f"{path} is not text: it has null bytes.")
    if text.strip():
        yield {"text": text, "code": suffix in _CODE}


def _document(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row, "code": False}
    if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: needs a string under the key 'text', but is {found}.")
    return {"text": row["text"], "code": bool(row.get("code"))}


def iterate_documents(documents: Documents) -> Iterator[dict[str, Any]]:
    """Documents from any source: a path, or an iterable of strings or mappings with a ``text``."""
    if isinstance(documents, str | Path):
        yield from read_documents(documents)
    else:
        yield from (_document(item, f"documents[{number}]") for number, item in enumerate(documents))
