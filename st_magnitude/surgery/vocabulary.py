"""A vocabulary that is trimmed while a model trains: the rows of the word table that texts use."""

from __future__ import annotations

import copy
import logging
import weakref
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel, Trainer

from st_magnitude._checks import InputError
from st_magnitude._distributed import engine_of_trainer, num_ranks
from st_magnitude.surgery.raw import unwrapped

__all__ = ["remembered_tokens", "trimmed_vocabulary"]

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.1  # of the weights of a model that have to be left out
NUM_TEXTS = 256  # are read at once
MOST_KNOWN = 500_000  # texts whose tokens are remembered, about 200 MB

Table: TypeAlias = nn.Embedding | nn.EmbeddingBag


@contextmanager
def trimmed_vocabulary(
    trained: SentenceTransformer | Trainer, texts: Iterable[str] = ()
) -> Iterator[None]:
    """Within the block, training changes only those rows of a word table that its texts use.

    Most rows belong to tokens that no training text has. They have no gradient and never move, but
    zeroing, clipping and the optimizer pass over all V rows at every step. Here the weight is a
    parameter of the K used rows, and so are its gradient and the state of the optimizer. At the
    end, after an error too, they are in the table again. Checkpoints and saved models hold all rows
    under their usual names, ``optimizer.pt`` too: resume them with the block or without it.

    The weights are those of training without it: bit for bit on one thread of a CPU, for every
    optimizer that treats each number alone, such as AdamW and SGD, but not Adafactor. On several
    threads, the norm by which gradients are clipped may differ in its last digit. ``weight_decay``
    does not shrink the other rows, and a warning says so: the data say nothing against their words.

    ``encode`` and evaluators read any text. A batch that needs gradients must not have a token
    without a row, which on CUDA is torch's error for an index out of range. Static tables tokenize
    a text once, not in every epoch.

    Left as they are, with a line in the log: tied and sparse tables, streams of texts, FSDP,
    DeepSpeed and DataParallel, a block in a block, and tables whose other rows are less than a
    tenth of the model's weights. Frozen and quantized tables have nothing to save.

    Args:
        trained: A Trainer, whose data set its collator reads once, with prompts. Or a model, which
            ``fit`` or a loop of yours trains.
        texts: What a model reads in training, prompts included. For a Trainer: what its data set
            does not show, such as words that a collator draws.

    Raises:
        ValueError: If a model comes without texts; in training, if a batch has other tokens, or the
            optimizer was made outside of the block.

    Example:
        ::

            with stm.trimmed_vocabulary(trainer):
                trainer.train()
    """
    trainer = trained if isinstance(trained, Trainer) else None
    given: Any = trained if trainer is None else trainer.model
    model: SentenceTransformer = unwrapped(given)
    texts = list(texts)
    if trainer is None and not texts:
        raise InputError(
            "trimmed_vocabulary(model) lacks the training texts: pass them, or pass the Trainer."
        )
    with ExitStack() as stack:
        tables = _tables(model, trainer)
        stack.enter_context(remembered_tokens(model))
        is_used = _used_tokens(model, trainer, texts, tables) if tables else torch.empty(0)
        trimmed = [
            _Trimmed(table, kept)
            for table in tables
            if (kept := _rows_to_train(model, table, is_used)) is not None
        ]
        for table in trimmed:
            stack.callback(table.close)
        if trimmed and trainer is not None:
            stack.callback(_forget, trainer, trainer.optimizer)
            _forget(trainer, trainer.optimizer)
        yield


@contextmanager
def remembered_tokens(model: SentenceTransformer) -> Iterator[None]:
    """Within the block, static tables of a model and of its copies tokenize a text once."""
    with ExitStack() as stack:
        for static in (part for part in model.modules() if isinstance(part, StaticEmbedding)):
            if not isinstance(static.tokenizer, _Remembering):
                stack.callback(setattr, static, "tokenizer", static.tokenizer)
                static.tokenizer = cast(Tokenizer, _Remembering(static.tokenizer))
        yield


def _forget(trainer: Any, optimizer: Optimizer | None) -> None:
    """Lets the next training make a wrapper of DistributedDataParallel, and an optimizer, anew:
    within the block the parameters are others."""
    trainer.model_wrapped = trainer.model
    trainer.optimizer = optimizer
    for part in _modules(trainer):
        wrapped = getattr(part, "model", None)
        if isinstance(wrapped, nn.Module) and unwrapped(wrapped) is trainer.model:
            part.model = trainer.model


def _modules(trainer: Trainer | None) -> list[nn.Module]:
    """All modules of the losses of a Trainer."""
    losses = getattr(trainer, "loss", None)
    losses = losses.values() if isinstance(losses, dict) else [losses]
    return [part for loss in losses if isinstance(loss, nn.Module) for part in loss.modules()]


# --- which rows -----------------------------------------------------------------------------------


def _tables(model: SentenceTransformer, trainer: Trainer | None) -> list[Table]:
    """The word tables of a model that can be trimmed."""
    found: list[Any] = []
    for part in model.modules():
        if isinstance(part, StaticEmbedding):
            found.append(part.embedding)
        elif isinstance(part, PreTrainedModel):
            try:
                found.append(part.get_input_embeddings())
            except (AttributeError, NotImplementedError):  # it reads no text
                continue
    parts = {*model.modules(), *_modules(trainer)}
    tables = []
    for table in dict.fromkeys(found):
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag) or not table.weight.requires_grad:
            continue
        if reason := _why_whole(table, parts, trainer):
            logger.warning("The word table is trained whole: %s.", reason)
        else:
            tables.append(table)
    return tables


def _why_whole(table: Table, parts: Iterable[nn.Module], trainer: Trainer | None) -> str | None:
    if trainer is not None:
        if engine := engine_of_trainer(trainer):
            return f"{engine} divides it among processes"
        if trainer.args.n_gpu > 1:
            return f"one process trains it on {trainer.args.n_gpu} GPUs"
        if isinstance(trainer.train_dataset, IterableDataset):
            return "its texts are a stream, which cannot be read in advance"
    if "forward" in vars(table):
        return "an outer block, or accelerate, has replaced its forward"
    weights = [weight for part in parts for weight in part._parameters.values()]
    if sum(weight is table.weight for weight in weights) > 1:
        return "it is tied to other weights"
    is_masked_bag = isinstance(table, nn.EmbeddingBag) and table.padding_idx is not None
    if table.sparse or table.max_norm is not None or is_masked_bag:
        return "it has sparse gradients, a limit of norms, or a bag with padding"
    return None


def _used_tokens(
    model: SentenceTransformer, trainer: Trainer | None, texts: list[str], tables: list[Table]
) -> Tensor:
    """Which tokens (V,) training reads, the special ones included; the same on all processes."""
    is_used = torch.zeros(max(len(table.weight) for table in tables), dtype=torch.uint8)
    if trainer is not None:
        data: Any = trainer.train_dataset
        for part in data.values() if isinstance(data, dict) else [data]:
            for columns in part.iter(NUM_TEXTS):
                rows = zip(*columns.values(), strict=True)
                batch = [dict(zip(columns, row, strict=True)) for row in rows]
                _mark(is_used, trainer.data_collator(batch))
    first = model[0]
    tasks = [*first.sub_modules] if isinstance(first, Router) else [None]
    for start, task in product(range(0, len(texts), NUM_TEXTS), tasks):
        _mark(is_used, model.preprocess(texts[start : start + NUM_TEXTS], task=task))
    special = [table.padding_idx for table in tables if table.padding_idx is not None]
    for module in model.modules():
        special += getattr(getattr(module, "tokenizer", None), "all_special_ids", [])
    _mark(is_used, {"input_ids": torch.tensor(special, dtype=torch.long)})
    if num_ranks() > 1:
        is_used = is_used.to(model.device)
        dist.all_reduce(is_used, dist.ReduceOp.MAX)
    return is_used


def _mark(is_used: Tensor, features: dict[str, Any]) -> None:
    for name, ids in features.items():
        if name.endswith("input_ids"):
            is_used[ids[ids < len(is_used)]] = 1


def _rows_to_train(model: SentenceTransformer, table: Table, is_used: Tensor) -> Tensor | None:
    """The rows (K,) of a table that are used, ascending, because sums run in their order. None if
    that leaves out too few weights."""
    num_rows, width = table.weight.shape
    kept = is_used[:num_rows].nonzero().flatten().to(table.weight.device)
    share = (num_rows - len(kept)) * width / sum(x.numel() for x in model.parameters())
    is_enough = len(kept) > 0 and share >= LEAST_SHARE
    what = "are trained" if is_enough else "are used, and all are trained"
    logger.info(f"{len(kept):,} of {num_rows:,} rows of the word table {what}.")
    return kept if is_enough else None


# --- a table of which some rows are trained -------------------------------------------------------


class _Trimmed:
    """A word table whose weight is, until `close`, a parameter of the kept rows.

    The module keeps its place, class, hooks and name, and state dicts hold the whole table.
    """

    def __init__(self, table: Table, kept: Tensor) -> None:
        self.table = table
        self.whole = table.weight  # (V, D), in which the kept rows are old until `_write`
        self.kept = kept  # (K,)
        self.places = torch.full((len(self.whole),), len(kept), device=kept.device)  # (V,)
        self.places[kept] = torch.arange(len(kept), device=kept.device)
        self.reader = copy.copy(table)
        self.reader.padding_idx = None
        self.small = copy.copy(table)  # has the parameters of the table, whatever they are
        if table.padding_idx is not None:
            self.small.padding_idx = int(self.places[table.padding_idx])
        table.weight = nn.Parameter(self.whole.detach()[kept])  # (K, D)
        table.forward = self.forward  # type: ignore[assignment]
        self.optimizers: list[weakref.ref[Optimizer]] = []  # no copy of the model copies them
        hooked: Any = table
        self.hooks = [
            hooked.register_state_dict_post_hook(partial(self._give_whole)),
            hooked.register_load_state_dict_pre_hook(self._take_kept),
            register_optimizer_step_pre_hook(self._join),
        ]

    def close(self) -> None:
        self._write()
        self.table.weight = self.whole
        del self.table.forward
        for hook in self.hooks:
            hook.remove()
        for alive in filter(None, (optimizer() for optimizer in self.optimizers)):
            alive.register_step_pre_hook(_refuse)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        places = self.places[ids]
        if torch.is_grad_enabled():
            self._check(ids, places)
            return self.small.forward(places, *args, **kwargs)
        is_kept = (places < len(self.kept))[..., None]
        trained = self.table.weight[places.clamp(max=len(self.kept) - 1)]
        rows = torch.where(is_kept, trained, self.whole[ids])  # of each token its own
        reader: Any = copy.copy(self.reader)
        reader._parameters = {"weight": rows.flatten(end_dim=-2)}
        each = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        found: Tensor = reader.forward(each, *args, **kwargs)
        return found

    def _check(self, ids: Tensor, places: Tensor) -> None:
        """Refuses tokens without a row. CUDA does so by itself, without waiting for the device."""
        if ids.is_cuda or torch.compiler.is_compiling():
            return
        if (others := ids[places == len(self.kept)]).numel():
            raise InputError(
                f"The token {int(others[0])} of a training batch is in no text that"
                " trimmed_vocabulary read, so it has no row to train. Pass the texts that have it,"
                " with their prompts: trimmed_vocabulary(..., texts=[...]). Under torch.no_grad()"
                " the model reads any text."
            )

    @torch.no_grad()
    def _write(self) -> None:
        self.whole.index_copy_(0, self.kept, self.table.weight)

    def _give_whole(
        self, _table: nn.Module, state: dict[str, Any], prefix: str, _metadata: object
    ) -> None:
        self._write()
        state[prefix + "weight"] = self.whole.detach()

    @torch.no_grad()
    def _take_kept(self, _table: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        rows = state.get(prefix + "weight")
        if rows is not None and rows.shape == self.whole.shape:
            self.whole.copy_(rows)
            state[prefix + "weight"] = self.whole[self.kept]

    def _join(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Before each step of any optimizer, which is made, and loads its state, in the block."""
        weights = _weights(optimizer)
        if any(weight is self.whole for weight in weights):
            _refuse(optimizer)
        if not any(weight is self.table.weight for weight in weights):
            return
        if not any(joined() is optimizer for joined in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))
            self.hooks.append(optimizer.register_state_dict_post_hook(self._save_whole))
            if any(group.get("weight_decay") for group in optimizer.param_groups):
                logger.warning(
                    "weight_decay does not shrink the %s rows of the word table that no training"
                    " text uses (trimmed_vocabulary).",
                    f"{len(self.whole) - len(self.kept):,}",
                )
        state = optimizer.state.get(self.table.weight, {})
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == self.whole.shape:  # of a checkpoint
                state[name] = value[self.kept.to(value.device)]

    def _save_whole(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Makes a state of all rows, with the zeros that it has without trimming."""
        for place, weight in enumerate(_weights(optimizer)):
            if weight is self.table.weight and place in state["state"]:
                values = state["state"][place] = dict(state["state"][place])
                for name, value in values.items():
                    if torch.is_tensor(value) and value.shape == weight.shape:
                        rows = value.new_zeros(self.whole.shape)
                        values[name] = rows.index_copy_(0, self.kept.to(value.device), value)


def _weights(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _refuse(*_: object) -> None:
    raise InputError(
        "This optimizer trains a word table as it is outside of a block of trimmed_vocabulary, or"
        " as it was inside, and would leave it as it is. Make the optimizer where it trains; a"
        " Trainer makes a new one if you set trainer.optimizer = None."
    )


class _Ids(NamedTuple):
    ids: array[int]


class _Remembering:
    """A tokenizer of the package tokenizers that reads a text once, though each epoch, fold and
    candidate has it. Copies share what it remembers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[tuple[Any, ...], _Ids] = {}  # by text and options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __deepcopy__(self, _memo: object) -> _Remembering:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Remembering, (self.tokenizer,)

    def encode_batch(self, texts: list[str], **options: Any) -> list[_Ids]:
        if len(self.known) > MOST_KNOWN:
            self.known = {}
        keys = [(text, *options.values()) for text in texts]
        new = [key for key in dict.fromkeys(keys) if key not in self.known]
        encoded = self.tokenizer.encode_batch([text for text, *_ in new], **options)
        self.known |= {x: _Ids(array("i", y.ids)) for x, y in zip(new, encoded, strict=True)}
        return [self.known[key] for key in keys]
