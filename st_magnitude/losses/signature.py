"""Signatures that show the options that a loss hands on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_type_hints

__all__ = ["with_options_of"]

Init = TypeVar("Init", bound=Callable[..., None])


def with_options_of(base: type, without: Collection[str] = ()) -> Callable[[Init], Init]:
    """Shows the arguments of a base class, but some, in place of the ``**options`` of an
    ``__init__``.

    Example:
        >>> class Base:
        ...     def __init__(self, model: str, *, scale: float = 20.0) -> None: ...
        >>> class Loss(Base):
        ...     @with_options_of(Base)
        ...     def __init__(self, model: str, weight: float = 1.0, **options) -> None: ...
        >>> list(inspect.signature(Loss).parameters)
        ['model', 'weight', 'scale']
    """
    base_init: Any = base.__init__  # type: ignore[misc]
    hints = get_type_hints(base_init)

    def decorate(init: Init) -> Init:
        own = dict(inspect.signature(init).parameters)
        own.pop("options")
        options = [
            parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(base_init).parameters.items()
            if name not in own and name not in without
        ]
        decorated: Any = init
        decorated.__signature__ = inspect.signature(init).replace(
            parameters=[*own.values(), *options]
        )
        decorated.__annotations__.pop("options", None)
        decorated.__annotations__.update({option.name: option.annotation for option in options})
        return init

    return decorate
