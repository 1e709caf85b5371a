"""A word table of which some rows are trained, and the optimizers that train it."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from st_magnitude._checks import InputError
from st_magnitude._upstream import num_writes

logger = logging.getLogger(__name__)

CHUNK = 4096  # rows whose state a new optimizer makes at once
SHRINKING = ("weight_decay", "lambd")  # options; the second one is ASGD's


@dataclass
class _Rows:
    """The other parts of a trimmed table, whose weight holds the kept rows alone."""

    whole: Tensor  # (V, D), which state dicts show
    kept: Tensor  # (K,), ascending
    places: Tensor  # (V,), of each row among the kept ones; K for all others
    padding_idx: int | None
    num_writes: int  # into the whole table; more of them come from its state dict
    shown: list[ref[Tensor]] = field(default_factory=list)  # the whole table, in state dicts


class Trimmed(nn.Module):
    """A word table whose weight has, within the block, the kept rows alone. It keeps its name, its
    hooks and its Parameter, and is still an instance of its class."""

    weight: nn.Parameter  # (K, D)
    rows: _Rows
    kind: type[Any]  # of the table
    family: WeakSet[Any]  # the table and its copies

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.take_written()
        places = self.rows.places[ids]
        if torch.is_grad_enabled():
            self._check(ids, places)
            return super().forward(places, *args, **kwargs)
        is_kept = (places < len(self.rows.kept))[..., None]
        trained = self.weight[places.clamp(max=len(self.rows.kept) - 1)]
        rows = torch.where(is_kept, trained, self.rows.whole[ids])  # of each token its own
        each = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        return self._plain(rows.flatten(end_dim=-2), None).forward(each, *args, **kwargs)

    def _check(self, ids: Tensor, places: Tensor) -> None:
        """Refuses tokens without a row. CUDA does so by itself, without waiting for the device."""
        if ids.is_cuda or torch.compiler.is_compiling():
            return
        if (others := ids[places == len(self.rows.kept)]).numel():
            raise InputError(
                f"The token {int(others[0])} of a training batch is in no text that"
                " trimmed_vocabulary read, so it has no row to train. Pass the texts that have it,"
                " with their prompts: trimmed_vocabulary(..., texts=[...]). Under torch.no_grad()"
                " the model reads any text."
            )

    @torch.no_grad()
    def take_written(self) -> None:
        """Takes what a program has written into the state dict, which is live as any other."""
        rows = self.rows
        if num_writes(rows.whole) != rows.num_writes:
            self.weight.copy_(rows.whole[rows.kept])
            rows.num_writes = num_writes(rows.whole)

    def show(self) -> None:
        """Writes the kept rows if somebody still has a state dict."""
        self.rows.shown = [shown for shown in self.rows.shown if shown() is not None]
        if self.rows.shown:
            self.write()

    @torch.no_grad()
    def write(self) -> None:
        self.take_written()
        self.rows.whole.index_copy_(0, self.rows.kept, self.weight)
        self.rows.num_writes = num_writes(self.rows.whole)

    def _plain(self, weight: Tensor, padding_idx: int | None) -> Any:
        """A table of the class as it was, with another weight."""
        plain = object.__new__(self.kind)
        vars(plain).update(vars(self), _parameters={"weight": weight}, padding_idx=padding_idx)
        del vars(plain)["rows"]
        return plain

    def _whole(self) -> Any:
        """The table as it was, with all rows as they are now."""
        self.write()
        weight = nn.Parameter(self.rows.whole, self.weight.requires_grad)
        return self._plain(weight, self.rows.padding_idx)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._whole()._save_to_state_dict(destination, prefix, keep_vars)
        self.rows.shown.append(ref(destination[prefix + "weight"]))

    def _load_from_state_dict(self, *args: Any) -> None:
        whole = self._whole()
        whole._load_from_state_dict(*args)
        self.rows.whole.copy_(whole.weight.data)  # another one after assign=True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The change that `to` and its like make to the weight."""
        self.write()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        rows = self.rows
        rows.whole = fn(rows.whole)
        rows.kept, rows.places = (x.to(rows.whole.device) for x in (rows.kept, rows.places))
        rows.num_writes = num_writes(rows.whole)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Trimmed:
        self.write()
        memo[id(self)] = copied = self.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied.rows.num_writes = num_writes(copied.rows.whole)
        copied.rows.shown = []
        self.family.add(copied)
        return copied

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return self._whole().__reduce_ex__(1)  # later ones want the class of this object


@contextmanager
def trimmed(table: Any, kept: Tensor) -> Iterator[None]:
    """Within the block, the weight of a table has the kept rows alone."""
    whole = table.weight.data  # which counts its writes apart from the Parameter
    places = torch.full((len(whole),), len(kept), device=kept.device)
    places[kept] = torch.arange(len(kept), device=kept.device)
    family, kind = WeakSet([table]), type(table)
    steps = _Steps(family, kept, whole.shape)
    try:
        table.rows = _Rows(whole, kept, places, table.padding_idx, num_writes(whole))
        table.__class__ = type(
            f"Trimmed{kind.__name__}", (Trimmed, kind), {"kind": kind, "family": family}
        )
        if table.padding_idx is not None:
            table.padding_idx = int(places[table.padding_idx])
        _give(table.weight, whole[kept])
        yield
    finally:
        steps.close()
        for member in list(family):
            _close(member)
    steps.resize_averages()


def _close(table: Any) -> None:
    rows = table.rows
    try:
        table.write()
    finally:
        table.__class__ = table.kind
        table.padding_idx = rows.padding_idx
        del table.rows
        _give(table.weight, rows.whole)


def _give(weight: nn.Parameter, rows: Tensor) -> None:
    """Gives a Parameter other rows, and no gradient."""
    weight.grad = None
    # torch makes the node that adds gradients anew for another type, but not for another shape
    other = torch.float16 if rows.dtype == torch.float32 else torch.float32
    weight.data = rows.new_empty(0, dtype=other)
    weight.data = rows


class _Steps:
    """The optimizers of a table and its copies, whose state has the kept rows alone from the first
    step in the block to the first step after it. State dicts always have all rows."""

    def __init__(self, family: WeakSet[Any], kept: Tensor, whole: torch.Size) -> None:
        self.family = family
        self.kept = kept
        self.whole = whole  # (V, D)
        self.joined: WeakSet[Optimizer] = WeakSet()
        self.is_open = True
        self.hook = register_optimizer_step_pre_hook(self._join)

    def close(self) -> None:
        self.is_open = False
        self.hook.remove()

    def resize_averages(self) -> None:
        """Gives all rows to optimizers such as ScheduleFree's, whose ``eval`` reads their state."""
        for optimizer in [x for x in self.joined if hasattr(x, "eval")]:
            self._before(optimizer)

    def _places(self, optimizer: Optimizer) -> dict[int, Any]:
        """Where an optimizer has the weights of the tables."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        tables = {id(table.weight): table for table in self.family}
        return {i: tables[id(x)] for i, x in enumerate(weights) if id(x) in tables}

    def _join(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer in self.joined or not self._places(optimizer):
            return
        kind = type(optimizer)
        if reason := why_rows_depend(kind, optimizer.defaults, self.kept.device):
            raise InputError(
                f"{kind.__name__} {reason}, so it may train other weights within"
                " trimmed_vocabulary. Use another optimizer, such as AdamW, or train without the"
                " block."
            )
        self.joined.add(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._save_whole)
        for name in SHRINKING:
            if any(group.get(name) for group in optimizer.param_groups):
                logger.warning(
                    f"{name} does not shrink the {self.whole[0] - len(self.kept):,} rows of the"
                    " word table that no training text uses (trimmed_vocabulary)."
                )

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self.joined:
            return
        for table in self._places(optimizer).values():
            state = optimizer.state.get(table.weight, {})
            if self.is_open:
                table.take_written()
                for name, x in _of_rows(state, self.whole[0]).items():
                    state[name] = x[self.kept.to(x.device)]
            else:
                state.update(self._of_all_rows(optimizer, table, state))
        if not self.is_open:
            self.joined.discard(optimizer)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self.is_open:
            for table in self._places(optimizer).values():
                table.show()

    def _save_whole(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        if optimizer not in self.joined:
            return
        for place, table in self._places(optimizer).items():
            if state := saved["state"].get(place):
                saved["state"][place] = state | self._of_all_rows(optimizer, table, state)

    def _of_all_rows(
        self, optimizer: Optimizer, table: Any, state: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The numbers of a state by row, for all rows (V, D): others have those of a new one."""
        numbers = _of_rows(state, len(self.kept))
        weight = table.rows.whole if isinstance(table, Trimmed) else table.weight
        new = _new_state(optimizer, weight) if numbers else {}
        for name, x in numbers.items():
            whole = new[name].to(x) if name in new else x.new_zeros(self.whole[0], *x.shape[1:])
            numbers[name] = whole.index_copy_(0, self.kept.to(x.device), x)
        return numbers


def _of_rows(state: dict[str, Any], number: int) -> dict[str, Tensor]:
    """The tensors of an optimizer's state that have so many rows."""
    tensors = {name: x for name, x in state.items() if torch.is_tensor(x)}
    return {name: x for name, x in tensors.items() if x.ndim and len(x) == number}


def _new_state(optimizer: Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """The state of a table (V, D) whose rows have had no gradient."""
    options = optimizer.defaults | dict.fromkeys(SHRINKING, 0)
    states = [
        _of_rows(_stepped(type(optimizer), options, rows, [0 * rows])[1], len(rows))
        for rows in weight.detach().split(CHUNK)
    ]
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def why_rows_depend(kind: Any, options: dict[str, Any], device: torch.device) -> str | None:
    """Why an optimizer of a class, with its options, may not update the rows of a small table as it
    would without the others; None if it does."""
    place = torch.arange(128.0, device=device).view(8, 16)
    gradients = [4**i * (place + i).sin() for i in range(3)]  # as some clip what grows
    if options.get("lr") is not None:
        options = options | {"lr": 1.0}
    try:
        few, whole = (
            _stepped(kind, options, (place[:n] / 7).cos(), [x[:n] for x in gradients])[0]
            for n in (2, 8)
        )
    except Exception:  # which belongs to a constructor or a step that is not known
        return "cannot be tried on a few rows of the word table"
    if torch.allclose(few, whole[:2], rtol=1e-5, atol=1e-6, equal_nan=True):
        return None
    return "reads other rows of the word table to update a row"


def _stepped(
    kind: Any, options: dict[str, Any], rows: Tensor, gradients: list[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Rows (n, D) after steps of a new optimizer, and its state."""
    weight = nn.Parameter(rows.clone())
    taken = options.keys() & inspect.signature(kind).parameters.keys()
    with torch.random.fork_rng([weight.device] if weight.is_cuda else []), torch.enable_grad():
        optimizer = kind([weight], **{name: options[name] for name in taken})
        if hasattr(optimizer, "train"):  # of ScheduleFree and its like
            optimizer.train()
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
    return weight.detach(), optimizer.state[weight]
