"""JSON: text that is read with one kind of error, and dataclasses of numbers and arrays that are read and written."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

__all__ = ["from_plain", "parse"]


def parse(text: str) -> Any:
    """The value of a JSON text, with one kind of error for everything that can be wrong.

    Raises:
        ValueError: If the text is not JSON, is nested too deeply, has a number of too many digits, or has half of a
            surrogate pair, which files cannot hold and tokenizers do not accept.

    Example:
        >>> parse('{"a": "\\\\ud800"}')
        Traceback (most recent call last):
        ...
        ValueError: a character that is not text: half of a surrogate pair
    """
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{error.msg}, {line}column {error.colno}") from None
    except UnicodeEncodeError:
        raise ValueError("a character that is not text: half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:  # Python refuses integers of more than 4,300 digits
        raise ValueError("a number of too many digits") from None
    return value


def from_plain(kind: Any, value: Any, name: str = "") -> Any:
    """Builds a value of the annotated type from plain JSON values: the inverse of `st_magnitude.result.to_plain`.

    Example:
        >>> from_plain(dict[str, tuple[float, ...]], {"a": [1, None, "inf"]})
        {'a': (1.0, nan, inf)}
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints, entries = get_type_hints(kind), _of(dict, value, name)
        if missing := [f.name for f in fields(kind) if f.name not in entries]:
            raise ValueError(f"{name or 'it'} has no {missing[0]!r}")
        parts = {f.name: from_plain(hints[f.name], entries[f.name], _join(name, f.name)) for f in fields(kind)}
        return kind(**parts)  # type: ignore[operator]
    if origin in (Union, UnionType):
        return None if value is None else from_plain(next(k for k in inner if k is not NoneType), value, name)
    if origin is np.ndarray:
        return _array(get_args(inner[1])[0], _of(list, value, name), name)
    if origin is dict:
        return {key: from_plain(inner[1], item, _join(name, key)) for key, item in _of(dict, value, name).items()}
    if origin is list or inner[1:] == (...,):
        items = (from_plain(inner[0], item, f"{name}[{i}]") for i, item in enumerate(_of(list, value, name)))
        return list(items) if origin is list else tuple(items)
    if origin is tuple:
        if len(_of(list, value, name)) != len(inner):
            raise ValueError(f"{name} has {len(value)} entries, not {len(inner)}")
        return tuple(from_plain(k, item, f"{name}[{i}]") for i, (k, item) in enumerate(zip(inner, value, strict=True)))
    if kind is float:
        if (number := _array(np.float64, value, name)).shape:
            raise ValueError(f"{name} is {type(value).__name__}, not a number")
        return float(number)
    return _of(kind, value, name)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _of(kind: type, value: Any, name: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name or 'it'} is {type(value).__name__}, not {kind.__name__}")
    return value


def _array(dtype: Any, value: Any, name: str) -> Any:
    try:
        return np.array(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not made of numbers: {error}") from None
