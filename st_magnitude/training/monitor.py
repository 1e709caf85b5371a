"""NormMonitor: the norms of a training run while it happens, in sentence-transformers' Trainer, in transformers', and
in a loop of one's own."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_magnitude._plot import pyplot
from st_magnitude._upstream import batch_size_of
from st_magnitude.geometry import isoscore, mean_cosine
from st_magnitude.similarity import COSINE, DOT
from st_magnitude.surgery.raw import raw_producers
from st_magnitude.training.trainer import calling_trainer

__all__ = ["NormMonitor"]

logger = logging.getLogger(__name__)

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
COLLAPSED_DIRECTIONS = 0.99  # mean cosine of the texts of one role
COLLAPSED_NORM = 1e-4  # mean norm
COLLAPSED_BELOW = 0.75  # accuracy by cosine over accuracy by dot, as in MagnitudeEvaluator, ...
COLLAPSED_BY, COLLAPSED_FROM = 0.2, 16  # ... and at least so far below it, in a batch of so many
PANELS = {  # what is drawn of every role
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

    As a callback of a Trainer it needs nothing else: ``SentenceTransformerTrainer(..., callbacks=[NormMonitor()])``.
    It listens behind the module that makes the embeddings, before a Normalize at the end, and neither the loss nor
    the model changes. At the first step and every ``every`` steps it makes a row, and the latest row goes into the
    Trainer's own logs, and so to W&B, TensorBoard and ``trainer.state.log_history``. Keys, for each role:

    - ``{role}_norm_mean``, ``_norm_cv`` (standard deviation over mean), ``_norm_p05``, ``_norm_p50``, ``_norm_p95``;
    - ``{role}_effective_lr``: lr / (mean norm)², the size of a cosine step (Theorem 3.4; under Adam an indication);
    - ``{role}_isoscore`` and ``{role}_mean_cosine`` of the batch, the first up to 1 / (1 + D / B) at best;
    - ``{role}_zero_gradients``: share of the embeddings that got no gradient at all, not one entry;

    and ``dot_cosine_gap``: the share of the first column whose own text of the second column scores highest in the
    batch, by dot less by cosine. Above 0 length helps; far above, it does all the work.

    Roles follow the columns of the data: query, document, negative_1, ... The rows of a step arrive column by column,
    however many forward passes they come in (merged columns, mini-batches of a cached loss, whose second pass is the
    one with gradients), so they are split by the batch size that the loss was given. Where that does not work out, all
    rows count as role ``all``. Outside of sentence-transformers' Trainer they are split into as many equal parts as
    there are ``roles``. Under gradient accumulation the last micro-batch of a step is measured; with several
    processes, the texts of the first.

    Collapse alarm, one warning each: the mean norm is below 1e-4 or not finite; the mean cosine of a role is above
    0.99; accuracy by cosine is below three quarters of that by dot, and by at least 0.2, in a batch of at least 16.

    Args:
        every: Steps between rows.
        csv: A file that gets a line a row.
        roles: Names of the columns, in their order.
        embeddings: What takes the embeddings (n, D) out of the output of a module; None knows a tensor, a tuple that
            begins with one, and a dict with ``"sentence_embedding"``.
        module: What makes the embeddings; None: the module in front of Normalize, of any other model the model.
        num_rows: Rows of a role that are measured, the first ones.

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
        if every < 1 or num_rows < 2:
            raise ValueError(f"every is at least 1 and num_rows at least 2, got {every} and {num_rows}.")
        self.every, self.roles, self.num_rows = every, tuple(roles), num_rows
        self.csv = None if csv is None else Path(csv)
        self.module = module
        self.rows: list[Row] = []
        self._extract = embeddings or _embeddings
        self._header: list[str] = []
        self._warned: set[str] = set()
        self._logged = 0  # rows that were in the logs already
        self._calls = 0  # of update()
        self._hooks: list[Any] = []
        self._is_armed = False
        self._lr: float | None = None
        self._forget()

    # --- a loop of one's own ----------------------------------------------------------------------------------------

    def update(
        self,
        queries: Tensor | None = None,
        documents: Tensor | None = None,
        lr: float | None = None,
        step: int | None = None,
        **others: Tensor,
    ) -> Row | None:
        """One step of a plain loop, after its backward pass; returns the row, or None between the measured steps.

        Args:
            queries: Raw embeddings (n, D). Their gradients count if ``queries.retain_grad()`` was called.
            documents: Likewise.
            lr: The learning rate of the step.
            step: Its number; None counts the calls.
            **others: More roles by name.

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
            ValueError: If there is none yet.
        """
        if not self.rows:
            raise ValueError("Nothing has been measured yet: call update() or train first.")
        return self.rows[-1]

    # --- a Trainer --------------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._go_first(calling_trainer())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        trainer = calling_trainer()
        self._go_first(trainer)
        self.on_train_end(args, state, control)  # of a run that was broken off
        producers = raw_producers(model) if self.module is None else [self.module]
        self._hooks = [module.register_forward_hook(self._listen) for module in producers]
        losses = getattr(trainer, "loss", None)  # sentence-transformers': one, or one a data set
        for loss in losses.values() if isinstance(losses, Mapping) else [losses]:
            if isinstance(loss, nn.Module):
                self._hooks.append(loss.register_forward_pre_hook(self._begin_batch))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        self._forget()
        self._is_armed = self._is_due(state.global_step + 1)
        self._lr = None if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._forget()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
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
        logs.update(row)  # what the callbacks after this one see
        state.log_history[-1].update(row)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def _go_first(self, trainer: Trainer | None) -> None:
        """In front of the callbacks that carry logs elsewhere. A new list: the old one is being walked."""
        if trainer is not None:
            handler = trainer.callback_handler
            handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    # --- what the hooks hear ----------------------------------------------------------------------------------------

    def _forget(self, columns: Sequence[Mapping[str, Any]] = ()) -> None:
        self._columns = columns
        self._parts: list[Tensor] = []  # embeddings in the order of the forward passes, (n, D) each
        self._gradients: dict[int, Tensor] = {}  # of part i

    @torch.compiler.disable
    def _begin_batch(self, _loss: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._is_armed and torch.is_grad_enabled() and inputs and isinstance(inputs[0], (list, tuple)):
            self._forget(inputs[0])

    @torch.compiler.disable
    def _listen(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._is_armed:
            return
        x = self._extract(output)
        if x.requires_grad:  # not the first pass of a cached loss, not an evaluation
            place = len(self._parts)
            self._parts.append(x.detach())
            x.register_hook(partial(self._gradients.__setitem__, place))

    def _by_role(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Embeddings and gradients of every role, (B, D) each."""
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
                    f"the mean norm of {role} embeddings is {norm:.3g} (alarm below {COLLAPSED_NORM:g} or not finite): "
                    "lower the weight decay or the learning rate.",
                )
            elif alike > COLLAPSED_DIRECTIONS:
                self._warn(
                    "direction",
                    f"the mean cosine of {role} embeddings is {alike:.4f} (alarm above {COLLAPSED_DIRECTIONS}): all of "
                    "them point the same way. Lower the learning rate; cut_init with where='output' only.",
                )
        if min(map(len, roles.values())) >= COLLAPSED_FROM and cosine < min(COLLAPSED_BELOW * dot, dot - COLLAPSED_BY):
            self._warn(
                "magnitude",
                f"in the batch {dot:.0%} are ranked first by dot and {cosine:.0%} by cosine (alarm below "
                f"{COLLAPSED_BELOW:.0%} of it, and by {COLLAPSED_BY:.0%}): length does the ranking. Use scale='auto' "
                "and a lower learning rate.",
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
        """Six panels over the steps, one line a role; the band around the norm is from the 5th to the 95th percentile.

        Args:
            path: The PNG to write, in a folder that exists.
            title: Above the panels.

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
        gap = f"dot less cosine accuracy at the end: {last['dot_cosine_gap']:+.3f}" if "dot_cosine_gap" in last else ""
        figure.suptitle("; ".join(part for part in (title, gap) if part), fontsize=10)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _measure(x: Tensor, lr: float | None) -> Row:
    """Everything about the embeddings of one role, (n, D) in float32."""
    lengths = torch.linalg.vector_norm(x, dim=1).double()
    mean = lengths.mean().item()
    row = {"norm_mean": mean, "norm_cv": lengths.std(correction=0).item() / mean if mean else math.nan}
    marks = torch.quantile(lengths, lengths.new_tensor(list(QUANTILES.values()))).tolist()
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
        f"NormMonitor found no embeddings in what the model returns ({type(output).__name__}): say where they are, "
        "NormMonitor(embeddings=lambda output: output.pooler_output), or name the module, NormMonitor(module=...)."
    )


def _batch_size(features: Mapping[str, Any]) -> int:
    """Texts in one column of features."""
    offsets = features.get("offsets")  # of a StaticEmbedding, whose tokens lie in one row
    return len(offsets) if isinstance(offsets, Tensor) else batch_size_of(features)
