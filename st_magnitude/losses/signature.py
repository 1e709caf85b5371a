"""Signatures that show the options that a loss hands on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TypeVar

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

    def decorate(init: Init) -> Init:
        own = dict(inspect.signature(init).parameters)
        del own["options"]
        inherited = inspect.signature(base, eval_str=True).parameters
        options = {
            name: parameter.replace(kind=parameter.KEYWORD_ONLY)
            for name, parameter in inherited.items()
            if name not in own and name not in without
        }
        vars(init)["__signature__"] = inspect.Signature([*own.values(), *options.values()])
        init.__annotations__.pop("options", None)
        init.__annotations__.update({name: x.annotation for name, x in options.items()})
        return init

    return decorate
