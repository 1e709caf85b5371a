"""NormMonitor: the norms of embeddings during a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from st_magnitude._checks import InputError, at_least
from st_magnitude._upstream import batch_size_of
from st_magnitude.geometry import isoscore, mean_cosine
from st_magnitude.losses.base import EmbeddingLoss
from st_magnitude.surgery.raw import raw_producers

NUM_ROWS = 256  # texts of a role that are measured


class NormMonitor(TrainerCallback):
    """Norms, effective learning rate and geometry of the embeddings of a training run.

    Pass it to sentence-transformers' Trainer, ``callbacks=[NormMonitor(loss)]``, or call
    :meth:`update` in a loop of your own (docs/papers.md). It measures raw embeddings at the first
    step and every ``every`` steps. The row goes into ``trainer.state.log_history`` and, after
    :func:`st_magnitude.attach`, to other callbacks. Each role has these keys:

    - ``{role}_norm_mean``, ``_norm_cv`` (standard deviation over mean), ``_norm_p05``,
      ``_norm_p50``, ``_norm_p95``;
    - ``{role}_effective_lr``: lr / (mean norm)², the size of a cosine step (Theorem 3.4);
    - ``{role}_isoscore`` and ``{role}_mean_cosine`` of the batch; the first is at most
      1 / (1 + D / B).

    Roles are the columns of the data (query, document, negative_1, ...), with the first 256 texts
    of each. A loss that embeds in another order has the one role ``all``. The last micro-batch is
    measured, of the first process.

    Args:
        loss: The Trainer's loss, or its dict of losses. Not needed in a loop of your own.
        every: Number of steps between rows.

    Attributes:
        rows: The rows of this process since it began, each with its ``step``.

    Example:
        >>> import torch
        >>> monitor = NormMonitor(every=1)
        >>> row = monitor.update(queries=torch.eye(4), documents=2 * torch.eye(4), lr=0.1)
        >>> row["query_norm_mean"], row["document_effective_lr"]
        (1.0, 0.025)

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning,
        sections 3 and 6.
    """

    def __init__(
        self, loss: nn.Module | Mapping[str, nn.Module] | None = None, every: int = 10
    ) -> None:
        at_least("every", every, 1)
        self.loss = loss
        self.every = every
        self.rows: list[dict[str, float]] = []
        self._unlogged: dict[str, float] = {}
        self._calls = 0  # of update()
        self._hooks = ExitStack()
        self._lr: float | None = None  # of the present step of a Trainer, if it is measured
        self._begin_batch()

    def update(
        self,
        queries: Tensor | None = None,
        documents: Tensor | None = None,
        lr: float | None = None,
        **others: Tensor,
    ) -> dict[str, float] | None:
        """Measures one step of a plain loop, and returns the row if the step is due.

        Args:
            queries: Raw embeddings (n, D).
            documents: Raw embeddings (m, D).
            lr: The learning rate of the step.
            **others: Raw embeddings of further roles by name.
        """
        self._calls += 1
        if not self._is_due(self._calls):
            return None
        given = {"query": queries, "document": documents, **others}
        return self._add(self._calls, {name: x for name, x in given.items() if x is not None}, lr)

    def on_train_begin(self, args: object, state: object, control: object, **given: Any) -> None:
        self.on_train_end()  # removes the hooks of a run that was interrupted
        if self.loss is None:
            raise InputError(
                "In a Trainer the monitor needs the loss, to tell columns apart: NormMonitor(loss)."
            )
        losses = self.loss.values() if isinstance(self.loss, Mapping) else [self.loss]
        for loss in losses:
            self._hooks.callback(loss.register_forward_pre_hook(self._begin_batch).remove)
        torch.compiler.reset()  # a compiled module without hooks does not look for new ones
        for module in raw_producers(given["model"]):
            self._hooks.callback(module.register_forward_hook(self._listen).remove)

    def on_step_begin(
        self, args: object, state: TrainerState, control: object, **given: Any
    ) -> None:
        is_due = state.is_world_process_zero and self._is_due(state.global_step + 1)
        self._lr = float(given["optimizer"].param_groups[0]["lr"]) if is_due else None

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if self._lr is not None and self._parts:
            self._add(state.global_step, self._by_role(), self._lr)
        self._lr = None
        self._begin_batch()

    def on_log(self, args: object, state: TrainerState, control: object, **given: Any) -> None:
        if "loss" in given["logs"]:
            given["logs"].update(self._unlogged)  # for the callbacks after this one
            state.log_history[-1].update(self._unlogged)
            self._unlogged = {}

    def on_train_end(self, *_: object, **__: object) -> None:
        self._hooks.close()

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    @torch.compiler.disable
    def _begin_batch(
        self,
        loss: nn.Module | None = None,
        inputs: tuple[Sequence[Mapping[str, Tensor]], ...] = ((),),
    ) -> None:
        """The hook before the loss, whose input has the columns of the batch."""
        self._columns = inputs[0]
        modules = [] if loss is None else loss.modules()
        self._ours = next((x for x in modules if isinstance(x, EmbeddingLoss)), None)
        self._parts: list[Tensor] = []  # embeddings in the order of the forward passes, (n, D) each

    @torch.compiler.disable
    def _listen(self, _module: nn.Module, _inputs: object, features: Mapping[str, Tensor]) -> None:
        x = features["sentence_embedding"]
        # neither the first pass of a cached loss nor an evaluation
        if self._lr is not None and x.requires_grad:
            self._parts.append(x.detach())

    def _by_role(self) -> dict[str, Tensor]:
        """The embeddings of every role, (B, D) each."""
        x = torch.cat(self._parts)
        size = batch_size_of(self._columns[0])
        rows = [torch.arange(start, start + size) for start in range(0, len(x), size)]
        if self._ours is not None and self._ours.order:  # which embeds texts in groups
            rows = [torch.from_numpy(numbers) for numbers in self._ours.order]
        # a frozen side is not heard, and a loss may leave the last columns out
        if len(rows) > len(self._columns) or max(int(y.max()) for y in rows) >= len(x):
            return {"all": x}
        names = ["query", "document", *(f"negative_{i}" for i in range(1, len(rows)))]
        return {name: x[y.to(x.device)] for name, y in zip(names, rows, strict=False)}

    @torch.no_grad()
    def _add(self, step: int, roles: Mapping[str, Tensor], lr: float | None) -> dict[str, float]:
        self._unlogged = {}
        for name, x in roles.items():
            figures = _measure(x.detach()[:NUM_ROWS].float().cpu(), lr)
            self._unlogged |= {f"{name}_{key}": value for key, value in figures.items()}
        self.rows.append({"step": step, **self._unlogged})
        return self.rows[-1]


def _measure(x: Tensor, lr: float | None) -> dict[str, float]:
    """All figures of the embeddings of one role, (n, D) in float32. Everything is computed on the
    CPU, in float64 where that matters: some devices have none."""
    norms = torch.linalg.vector_norm(x, dim=1).double()
    mean = norms.mean().item()
    row = {"norm_mean": mean}
    row["norm_cv"] = norms.std(correction=0).item() / mean if mean else math.nan
    for percent in (5, 50, 95):
        row[f"norm_p{percent:02}"] = torch.quantile(norms, percent / 100).item()
    if lr is not None and mean:
        row["effective_lr"] = lr / mean**2
    if len(x) > 1 and math.isfinite(mean):
        row["mean_cosine"] = mean_cosine(x)
        if x.shape[1] > 1:
            row["isoscore"] = isoscore(x)
    return row
