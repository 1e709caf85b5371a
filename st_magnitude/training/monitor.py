"""NormMonitor: the norms of embeddings during a training run.

It works in the Trainer of sentence-transformers, in that of transformers, and in a loop of your own.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.training_args import BaseTrainingArguments
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude._checks import at_least
from st_magnitude._plot import pyplot
from st_magnitude._upstream import batch_size_of
from st_magnitude.geometry import isoscore, mean_cosine
from st_magnitude.similarity import COSINE, DOT
from st_magnitude.surgery.raw import raw_producers

__all__ = ["NormMonitor"]

logger = logging.getLogger(__name__)

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
COLLAPSED_DIRECTIONS = 0.99  # mean cosine of the texts of one role
COLLAPSED_NORM = 1e-4  # mean norm
COLLAPSED_BELOW = 0.75  # accuracy by cosine over accuracy by dot, as in MagnitudeEvaluator
COLLAPSED_BY, COLLAPSED_FROM = 0.2, 16  # the least difference of the two accuracies, and the least batch size
PANELS = {  # figures of every role that plot() draws
    "norm_mean": "norm: mean, 5 % to 95 %",
    "effective_lr": "learning rate / norm²",
    "norm_cv": "norm: standard deviation / mean",
    "isoscore": "IsoScore of the batch",
    "mean_cosine": "mean cosine of the batch",
    "zero_gradients": "share without any gradient",
}
Row = dict[str, float]


class NormMonitor(TrainerCallback):
    """Norms, effective learning rate and geometry of the embeddings of a training run, step by step.

    Pass it to a Trainer as a callback: ``SentenceTransformerTrainer(..., callbacks=[NormMonitor()])``. It measures the
    raw embeddings, before any Normalize at the end, and changes neither the loss nor the model. At the first step and
    every ``every`` steps it makes a row. The latest row goes into ``trainer.state.log_history`` and, after
    :func:`st_magnitude.attach`, into the logs that Weights & Biases, TensorBoard and other callbacks receive. Each role
    has these keys:

    - ``{role}_norm_mean``, ``_norm_cv`` (standard deviation over mean), ``_norm_p05``, ``_norm_p50``, ``_norm_p95``;
    - ``{role}_effective_lr``: lr / (mean norm)², the size of a cosine step (Theorem 3.4; under Adam an indication);
    - ``{role}_isoscore`` and ``{role}_mean_cosine`` of the batch; the first is at most 1 / (1 + D / B);
    - ``{role}_zero_gradients``: the share of the embeddings whose gradient is 0 in every entry.

    ``dot_cosine_gap`` is an accuracy by dot minus the same accuracy by cosine: the share of the first column whose own
    text of the second column scores highest in the batch. Above 0 the norm helps; far above 0 it decides everything.

    Roles follow the columns of the data: query, document, negative_1, and so on. The embeddings of a step arrive column
    by column, in one or several forward passes (merged columns, or mini-batches of a cached loss, whose second pass
    has the gradients). The monitor splits them by the batch size of the loss's input. If that does not work out, all
    rows have the role ``all``. Outside of sentence-transformers' Trainer it splits them into as many equal parts as
    there are ``roles``. Under gradient accumulation it measures the last micro-batch of a step, and with several
    processes the texts of the first process.

    The monitor warns once about each kind of collapse: the mean norm is below 1e-4 or not finite; the mean cosine of a
    role is above 0.99; in a batch of at least 16, accuracy by cosine is below three quarters of that by dot, and lower
    by at least 0.2.

    Args:
        every: Number of steps between rows.
        csv: File that gets one line per row; None: no file.
        roles: Names of the columns, in their order.
        embeddings: Function that takes the embeddings (n, D) out of the output of a module. None knows a tensor, a
            tuple that begins with one, and a dict with ``"sentence_embedding"``.
        module: Module that computes the embeddings. None: the module before Normalize in a SentenceTransformer, and
            any other model itself.
        num_rows: Number of rows of a role to measure; the first rows are taken.

    Attributes:
        rows: All rows so far, each with its ``step``.

    Raises:
        ValueError: If every or num_rows is too small.

    Example:
        >>> import torch
        >>> monitor = NormMonitor(every=1)
        >>> row = monitor.update(queries=torch.eye(4), documents=2 * torch.eye(4), lr=0.1)
        >>> row["query_norm_mean"], row["document_effective_lr"], row["dot_cosine_gap"]
        (1.0, 0.025, 0.0)

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, sections 3 and 6, Fig. 5
    and S3; Beyond the Unit Hypersphere, arXiv 2602.09229, App. N (collapse).
    """

    def __init__(
        self,
        every: int = 10,
        csv: str | Path | None = None,
        roles: Sequence[str] = ("query", "document"),
        embeddings: Callable[[Any], Tensor] | None = None,
        module: nn.Module | None = None,
        num_rows: int = 256,
    ) -> None:
        at_least("every", every, 1)
        at_least("num_rows", num_rows, 2)
        self.every, self.roles, self.num_rows = every, tuple(roles), num_rows
        self.csv = None if csv is None else Path(csv)
        self.module = module
        self.rows: list[Row] = []
        self._extract = embeddings or _embeddings
        self._header: list[str] = []
        self._warned: set[str] = set()
        self._logged = 0  # the number of rows when the last log was written
        self._calls = 0  # the number of calls of update()
        self._hooks: list[Any] = []
        self._awaited: Any = None  # the hook that waits for the next batch of a loss
        self._is_armed = False
        self._lr: float | None = None
        self._forget()

    # --- a loop of your own -----------------------------------------------------------------------------------------

    def update(
        self,
        queries: Tensor | None = None,
        documents: Tensor | None = None,
        lr: float | None = None,
        step: int | None = None,
        **others: Tensor,
    ) -> Row | None:
        """Measures one step of a plain loop, after its backward pass.

        Args:
            queries: Raw embeddings (n, D). For the share of zero gradients, call ``queries.retain_grad()`` before.
            documents: Raw embeddings (m, D), in the same way.
            lr: Learning rate of the step.
            step: Number of the step; None counts the calls.
            **others: Raw embeddings of more roles by name.

        Returns:
            The row, or None for a step that is not measured.

        Raises:
            ValueError: If there are no embeddings.
        """
        given = {"query": queries, "document": documents, **others}
        roles = {name: x for name, x in given.items() if x is not None}
        if not roles:
            raise ValueError("update() needs embeddings: update(queries=q, documents=d, lr=lr).")
        self._calls += 1
        step = self._calls if step is None else step
        if not self._is_due(step):
            return None
        gradients = {name: x.grad for name, x in roles.items() if (x.is_leaf or x.retains_grad) and x.grad is not None}
        return self._add(step, roles, gradients, lr, write=True)

    def row(self) -> Row:
        """The latest row.

        Raises:
            ValueError: If there are no rows yet.
        """
        if not self.rows:
            raise ValueError("Nothing has been measured yet. Call update() or train first.")
        return self.rows[-1]

    # --- a Trainer --------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self.on_train_end(args, state, control)  # removes the hooks of a run that was interrupted
        producers = raw_producers(model) if self.module is None else [self.module]
        self._hooks = [module.register_forward_hook(self._listen) for module in producers]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        self._is_armed = self._is_due(state.global_step + 1)
        self._begin(args)
        self._lr = None if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begin(args)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._stop_waiting()
        if self._is_armed and self._parts:
            self._add(state.global_step, *self._by_role(), self._lr, write=state.is_world_process_zero)
        self._is_armed = False
        self._forget()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is None or "loss" not in logs or self._logged == len(self.rows):
            return
        self._logged = len(self.rows)
        row = {key: value for key, value in self.rows[-1].items() if key != "step"}
        logs.update(row)  # for the callbacks after this one
        state.log_history[-1].update(row)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._stop_waiting()
        while self._hooks:
            self._hooks.pop().remove()

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    # --- what the hooks receive -------------------------------------------------------------------------------------

    def _forget(self, columns: Sequence[Mapping[str, Any]] = ()) -> None:
        self._columns = columns
        self._parts: list[Tensor] = []  # embeddings in the order of the forward passes, (n, D) each
        self._gradients: dict[int, Tensor] = {}  # of part i

    def _begin(self, args: TrainingArguments) -> None:
        """Waits for the next micro-batch of a measured step.

        A callback does not know the losses of its Trainer. So the next module that is called with a list of features
        is taken for the loss: sentence-transformers calls the loss before any module of the model.
        """
        self._forget()
        self._stop_waiting()
        if self._is_armed and isinstance(args, BaseTrainingArguments):
            self._awaited = register_module_forward_pre_hook(self._begin_batch)

    def _stop_waiting(self) -> None:
        if self._awaited is not None:
            self._awaited.remove()
            self._awaited = None

    @torch.compiler.disable
    def _begin_batch(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        columns = inputs[0] if inputs else None
        if isinstance(columns, (list, tuple)) and columns and all(isinstance(x, Mapping) for x in columns):
            self._stop_waiting()
            self._forget(columns)

    @torch.compiler.disable
    def _listen(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._is_armed:
            return
        x = self._extract(output)
        if x.requires_grad:  # neither the first pass of a cached loss nor an evaluation
            place = len(self._parts)
            self._parts.append(x.detach())
            x.register_hook(partial(self._gradients.__setitem__, place))

    def _by_role(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The embeddings and gradients of every role, (B, D) each."""
        x = torch.cat(self._parts)
        whole = len(self._gradients) == len(self._parts)
        g = torch.cat([self._gradients[i] for i in range(len(self._parts))]) if whole else None
        size = _batch_size(self._columns[0]) if self._columns else len(x) // len(self.roles)
        count, rest = divmod(len(x), max(size, 1))
        if rest or count > max(len(self._columns), len(self.roles)):
            size, names = len(x), ["all"]
        else:  # a loss may leave the last columns out
            names = [*self.roles, *(f"negative_{i}" for i in range(1, count))][:count]
        return (
            dict(zip(names, x.split(size), strict=True)),
            {} if g is None else dict(zip(names, g.split(size), strict=True)),
        )

    # --- a row ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _add(
        self, step: int, roles: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float | None, write: bool
    ) -> Row:
        roles = {name: x.detach()[: self.num_rows].float() for name, x in roles.items()}
        row: Row = {"step": step}
        for name, x in roles.items():
            row |= {f"{name}_{key}": value for key, value in _measure(x, lr).items()}
            if name in gradients:
                row[f"{name}_zero_gradients"] = float((gradients[name] == 0).all(dim=1).double().mean())
        matched = list(roles.values())[:2]
        dot = cosine = math.nan
        if len(matched) == 2 and len(matched[0]) == len(matched[1]) > 1:
            own = torch.arange(len(matched[0]), device=matched[0].device)
            dot, cosine = ((s(*matched).argmax(dim=1) == own).double().mean().item() for s in (DOT, COSINE))
            row["dot_cosine_gap"] = dot - cosine
        self.rows.append(row)
        if write:
            self._sound_alarm(row, roles, dot, cosine)
            self._write(row)
        return row

    def _sound_alarm(self, row: Row, roles: Mapping[str, Tensor], dot: float, cosine: float) -> None:
        for role in roles:
            norm, alike = row[f"{role}_norm_mean"], row.get(f"{role}_mean_cosine", 0.0)
            if not COLLAPSED_NORM < norm < math.inf:
                self._warn(
                    "norm",
                    f"the mean norm of {role} embeddings is {norm:.3g}, below {COLLAPSED_NORM:g} or not finite. "
                    "Lower the weight decay or the learning rate.",
                )
            elif alike > COLLAPSED_DIRECTIONS:
                self._warn(
                    "direction",
                    f"the mean cosine of {role} embeddings is {alike:.4f}, above {COLLAPSED_DIRECTIONS}: they all have "
                    "the same direction. Lower the learning rate; use cut_init with where='output' only.",
                )
        if min(map(len, roles.values())) >= COLLAPSED_FROM and cosine < min(COLLAPSED_BELOW * dot, dot - COLLAPSED_BY):
            self._warn(
                "magnitude",
                f"in the batch {dot:.0%} of the positives rank first by dot and {cosine:.0%} by cosine (the alarm is "
                f"below {COLLAPSED_BELOW:.0%} of dot, and {COLLAPSED_BY:.0%} lower): norms decide the ranking. Use "
                "scale='auto' and a lower learning rate.",
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("Collapse at step %d: %s", self.rows[-1]["step"], text)

    def _write(self, row: Row) -> None:
        if self.csv is None:
            return
        grown = not set(row) <= set(self._header)
        if grown:
            self._header += [key for key in row if key not in self._header]
            self.csv.parent.mkdir(parents=True, exist_ok=True)
        with self.csv.open("w" if grown else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=self._header, restval="", lineterminator="\n")
            if grown:
                writer.writeheader()
            writer.writerows(self.rows if grown else [row])

    # --- a picture --------------------------------------------------------------------------------------------------

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draws six panels over the steps, with one line per role.

        The band around the norm spans the 5th to the 95th percentile.

        Args:
            path: PNG file to write, in a folder that exists.
            title: Title above the panels.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If there are no rows.
        """
        last, plt = self.row(), pyplot()
        suffix = "_norm_mean"
        roles = list(dict.fromkeys(key[: -len(suffix)] for row in self.rows for key in row if key.endswith(suffix)))
        figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), sharex=True, layout="constrained")
        for axis, (panel, label) in zip(axes.flat, PANELS.items(), strict=True):
            for role in roles:
                rows = [row for row in self.rows if f"{role}_{panel}" in row]
                steps = [row["step"] for row in rows]
                (line,) = axis.plot(steps, [row[f"{role}_{panel}"] for row in rows], label=role, linewidth=1.5)
                if panel == "norm_mean":
                    low, high = ([row[f"{role}_norm_{p}"] for row in rows] for p in ("p05", "p95"))
                    axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axis.set_title(label, fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            if panel == "zero_gradients":
                axis.set_ylim(-0.03, 1.03)
            if not axis.lines or not any(len(line.get_xdata()) for line in axis.lines):
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#777777")
        for axis in axes[1]:
            axis.set_xlabel("step")
        axes[0, 0].legend(frameon=False, fontsize=8)
        gap = f"accuracy by dot minus by cosine: {last['dot_cosine_gap']:+.3f}" if "dot_cosine_gap" in last else ""
        figure.suptitle("; ".join(part for part in (title, gap) if part), fontsize=10)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _measure(x: Tensor, lr: float | None) -> Row:
    """All figures of the embeddings of one role, (n, D) in float32."""
    norms = torch.linalg.vector_norm(x, dim=1).double()
    mean = norms.mean().item()
    row = {"norm_mean": mean, "norm_cv": norms.std(correction=0).item() / mean if mean else math.nan}
    marks = torch.quantile(norms, norms.new_tensor(list(QUANTILES.values()))).tolist()
    row |= {f"norm_{name}": mark for name, mark in zip(QUANTILES, marks, strict=True)}
    if lr is not None and mean:
        row["effective_lr"] = lr / mean**2
    if len(x) > 1 and math.isfinite(mean):
        row["mean_cosine"] = mean_cosine(x)
        if x.shape[1] > 1:
            row["isoscore"] = isoscore(x)
    return row


def _embeddings(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    if isinstance(output, Mapping) and "sentence_embedding" in output:
        return output["sentence_embedding"]
    raise TypeError(
        f"NormMonitor found no embeddings in the output of the model, which is {type(output).__name__}. Say where they "
        "are, NormMonitor(embeddings=lambda output: output.pooler_output), or name the module, NormMonitor(module=...)."
    )


def _batch_size(features: Mapping[str, Any]) -> int:
    """The number of texts in one column of features."""
    offsets = features.get("offsets")  # the features of a StaticEmbedding are the tokens of all texts in one row
    return len(offsets) if isinstance(offsets, Tensor) else batch_size_of(features)
