"""A vocabulary that is trimmed while a model trains, to the rows of the word table that texts use,
and a tokenizer of a static table that reads a text once."""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
from transformers import PreTrainedModel, Trainer

from st_magnitude._checks import InputError
from st_magnitude._distributed import engine_of_trainer, num_ranks
from st_magnitude._upstream import has_gradient_hooks
from st_magnitude.surgery.raw import unwrapped
from st_magnitude.surgery.trimmed import Trimmed, trimmed, why_rows_depend

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.1  # of the weights of a model that have to be left out
NUM_TEXTS = 256  # are read at once
MOST_KNOWN = 500_000  # texts whose tokens are remembered, about 200 MB
OPTIONS = {"add_special_tokens": False}  # with which a static table reads

Table: TypeAlias = nn.Embedding | nn.EmbeddingBag


@contextmanager
def trimmed_vocabulary(
    trained: SentenceTransformer | Trainer, texts: Iterable[str] = ()
) -> Iterator[None]:
    """Within the block, training changes only those rows of a word table that its texts use.

    The weight holds the K used rows of V, and so do its gradient and the state of the optimizer.
    State dicts, which are live, checkpoints, ``optimizer.pt`` too, pickles and saved models hold
    all rows under their usual names: resume them with the block or without it. At the end, after an
    error too, the table has all its rows, and so has each deep copy that was made in the block.

    The weights are those of training without it: bit for bit on one thread of a CPU, for every
    optimizer that trains each row by itself, such as AdamW and SGD. One that reads other rows for
    it, such as Muon and Adafactor, or that cannot be tried on a few rows, trains the whole table in
    a Trainer (ValueError in other loops).
    The norm by which gradients are clipped may differ in its last digit on several threads, and if
    the width of the table is no multiple of 8. ``weight_decay`` does not shrink the other rows, and
    a warning says so.

    An optimizer can live on from before the block, and after it. The state of the other rows is
    that of a new optimizer from then on. The gradient of the table does not cross either end of the
    block. What has the shape of the table from before, such as an average or a copy of the weights,
    does not fit it within the block: make it there.

    ``encode`` and evaluators read any text. A batch that needs gradients must not have a token
    without a row, which on CUDA is torch's error for an index out of range. Static tables tokenize
    a text once, not in every epoch.

    Left as they are, with a line in the log: tied and sparse tables, streams of texts, FSDP,
    DeepSpeed and DataParallel, a Trainer with ``model_init``, a block in a block, tables with a
    hook on their gradient, and those whose other rows are less than a tenth of the model's weights.
    Frozen and quantized tables have nothing to save.

    Args:
        trained: A Trainer, whose data set its collator reads once, with prompts. Or a model, which
            ``fit`` or a loop of yours trains.
        texts: What a model reads in training, prompts included. For a Trainer: what its data set
            does not show, such as words that a collator draws.

    Raises:
        ValueError: If a model comes without texts; in training, if a batch has other tokens.

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
        for table in tables:
            if (kept := _rows_to_train(model, table, is_used)) is not None:
                stack.enter_context(trimmed(table, kept))
        if trainer is not None:
            stack.callback(_unwrap, trainer)
            _unwrap(trainer)
        yield


def _unwrap(trainer: Any) -> None:
    """Lets the next training wrap the table, whose weight has another shape, anew for DDP."""
    trainer.model_wrapped = trainer.model
    for part in _modules(trainer):
        wrapped = getattr(part, "model", None)
        if isinstance(wrapped, nn.Module) and unwrapped(wrapped) is trainer.model:
            part.model = trainer.model


def _modules(trainer: Trainer | None) -> list[nn.Module]:
    losses = getattr(trainer, "loss", None)
    losses = losses.values() if isinstance(losses, dict) else [losses]
    return [part for loss in losses if isinstance(loss, nn.Module) for part in loss.modules()]


# --- which rows -----------------------------------------------------------------------------------


def _tables(model: SentenceTransformer, trainer: Trainer | None) -> list[Table]:
    found: list[Any] = []
    for part in model.modules():
        if isinstance(part, StaticEmbedding):
            found.append(part.embedding)
        elif isinstance(part, PreTrainedModel):
            try:
                table = part.get_input_embeddings()
            except (AttributeError, NotImplementedError):  # it reads no text
                continue
            weight = getattr(table, "weight", None)  # peft's modules_to_save wraps what has it
            found += [x for x in table.modules() if getattr(x, "weight", None) is weight]
    parts = {*model.modules(), *_modules(trainer)}
    tables = []
    for table in dict.fromkeys(found):
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag) or not table.weight.requires_grad:
            continue
        if reason := _why_whole(table, parts, trainer):
            logger.warning(f"The word table is trained whole: {reason}.")
        else:
            tables.append(table)
    return tables


def _why_whole(table: Table, parts: Iterable[nn.Module], trainer: Trainer | None) -> str | None:
    if trainer is not None:
        if engine := engine_of_trainer(trainer):
            return f"{engine} divides it among processes"
        if trainer.model_init is not None:
            return "model_init makes another model when training begins"
        kind, options = _optimizer_of(trainer)
        if reason := why_rows_depend(kind, options, table.weight.device):
            return f"{kind.__name__} {reason}"
        if trainer.args.n_gpu > 1:
            return f"one process trains it on {trainer.args.n_gpu} GPUs"
        if isinstance(trainer.train_dataset, IterableDataset):
            return "its texts are a stream, which cannot be read in advance"
    if isinstance(table, Trimmed):
        return "an outer block has trimmed it"
    if has_gradient_hooks(table.weight):
        return "a hook on its gradient may know its rows"
    if "forward" in vars(table):
        return "accelerate, or another library, has replaced its forward"
    named: Any = {"recurse": False, "remove_duplicate": False}
    weights = [weight for part in parts for _, weight in part.named_parameters(**named)]
    if sum(weight is table.weight for weight in weights) > 1:
        return "it is tied to other weights"
    is_masked_bag = isinstance(table, nn.EmbeddingBag) and table.padding_idx is not None
    if table.sparse or table.max_norm is not None or is_masked_bag:
        return "it has sparse gradients, a limit of norms, or a bag with padding"
    return None


def _optimizer_of(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """The class and the options of the optimizer that will train."""
    if trainer.optimizer is not None:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's
        return type(optimizer), optimizer.defaults
    given: tuple[Any, dict[str, Any]] | None = trainer.optimizer_cls_and_kwargs
    return given or trainer.get_optimizer_cls_and_kwargs(trainer.args)


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


# --- a text is read once --------------------------------------------------------------------------


@contextmanager
def remembered_tokens(model: SentenceTransformer) -> Iterator[None]:
    """Within the block, static tables of a model and of its copies tokenize a text once."""
    with ExitStack() as stack:
        for static in (part for part in model.modules() if isinstance(part, StaticEmbedding)):
            if not isinstance(static.tokenizer, _Remembering):
                stack.callback(setattr, static, "tokenizer", static.tokenizer)
                static.tokenizer = cast(Tokenizer, _Remembering(static.tokenizer))
        yield


class _Encoding(NamedTuple):
    """The part of an encoding that a static table reads."""

    ids: array[int]


class _Remembering:
    """A tokenizer of the package tokenizers that reads a text once, though each epoch, fold and
    candidate has it. Copies share what it remembers, and pickles are the tokenizer itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, _Encoding] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __deepcopy__(self, _memo: object) -> _Remembering:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.tokenizer,)

    def encode_batch(self, texts: list[str], *args: Any, **options: Any) -> list[Any]:
        if args or options != OPTIONS:
            return self.tokenizer.encode_batch(texts, *args, **options)
        if len(self.known) > MOST_KNOWN:
            self.known = {}
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        encoded = self.tokenizer.encode_batch(new, **OPTIONS)
        for text, encoding in zip(new, encoded, strict=True):
            self.known[text] = _Encoding(array("i", encoding.ids))
        return [self.known[text] for text in texts]
