"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, for the names under its ``if
    TYPE_CHECKING:``, which are imported on first use.

    Type checkers read the same lines, so every name is declared once.
    """
    module = sys.modules[package]
    source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
    guarded = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = (
            import_module(f"{home}.{name}")
            if home == package
            else getattr(import_module(home), name)
        )
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes}), sorted(homes)
