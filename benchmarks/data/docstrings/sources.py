"""The Python source files of the installed packages and of the standard library."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

__all__ = ["environment_fingerprint", "is_public", "package_files"]

_SKIPPED_FOLDER = re.compile(
    r"__pycache__|_vendor|vendor|vendored|_vendored|_distutils|externals|extern|third_party|site-packages|"
    r"dist-packages|test|tests|testing|conftest|testdata|idlelib|lib2to3|ensurepip|turtledemo|pydoc_data|"
    r"node_modules"
)
_MAX_BYTES = 600_000  # larger files are generated tables


def package_files(roots: Sequence[str | Path] | None = None) -> dict[str, tuple[Path, list[Path]]]:
    """Import name of each package, or ``"stdlib"``, to the folder of its module names and its
    files; all sorted."""
    found: dict[str, tuple[Path, list[Path]]] = {}
    if roots is None:
        paths = sysconfig.get_paths()
        folders = [*sys.path, paths["purelib"], paths["platlib"]]
        roots = [
            folder for folder in folders if Path(folder).name in ("site-packages", "dist-packages")
        ]
        library = Path(paths["stdlib"])
        modules = [
            path for path in _sources(library) if is_public(path.relative_to(library).parts[0])
        ]
        found["stdlib"] = library, modules
    for root in map(Path, roots):
        for package in sorted(root.iterdir()) if root.is_dir() else ():
            name = package.name
            if name in found or name == "st_magnitude" or not (package / "__init__.py").is_file():
                continue
            if name.isidentifier() and is_public(name) and not _SKIPPED_FOLDER.fullmatch(name):
                found[name] = root, _sources(package)
    return {name: found[name] for name in sorted(found)}


def environment_fingerprint(roots: Sequence[str | Path] | None = None) -> str:
    """A hash that changes with the interpreter, the installed distributions and the roots."""
    installed = sorted(f"{d.name}=={d.version}" for d in distributions())
    text = repr((sys.version, installed, None if roots is None else [str(root) for root in roots]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_public(name: str) -> bool:
    return not name.startswith("_")


def _sources(folder: Path) -> list[Path]:
    """Source files below a folder, sorted, without tests and vendored copies of other packages."""
    sources: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _SKIPPED_FOLDER.fullmatch(name))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(("test_", "conftest")):
                sources.append(Path(parent, name))
    return [path for path in sources if path.stat().st_size <= _MAX_BYTES]
