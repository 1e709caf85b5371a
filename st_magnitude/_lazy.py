"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, for the names under its ``if
    TYPE_CHECKING:``, which are imported on first use.

    Type checkers read the same lines, so every name is declared once. They are read from the
    compiled module, which an installation without sources has, too.
    """
    module = sys.modules[package]
    code = module.__spec__.loader.get_code(package)  # type: ignore[union-attr]
    homes: dict[str, str] = {}
    home = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            home = step.argval
        elif step.opname == "IMPORT_FROM" and step.argval not in vars(module):
            homes[step.argval] = home

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            value: object = import_module(f"{home}.{name}")
        else:
            value = getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes}), sorted(homes)
