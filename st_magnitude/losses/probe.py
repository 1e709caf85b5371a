"""The cost of a pass, and whether a model reads padding: found once for each model."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sentence_transformers.base.losses.gradcache import RandContext
from torch import nn

from st_magnitude._distributed import engine_of, largest_of_ranks
from st_magnitude.surgery.raw import keeps_modes, unwrapped

logger = logging.getLogger(__name__)

Features = dict[str, Any]

BY_PASS = (nn.BatchNorm1d, nn.SyncBatchNorm)  # their statistics are those of the texts of a pass

# A pass launches the kernels of each module with weights, and adds to the gradient of each trained
# weight. In the time of either, so many weights are multiplied with one token, in both directions.
# On a CPU, launches take no time, and gradients were measured on one thread: 100 tokens for MiniLM
# and about 60 for BERT base. Those of other devices are guesses, until somebody measures them:
# 5e-5 s a module, 1e14 operations and 2e12 bytes a second.
OF_CPU = 0.0, 47.0
OF_DEVICES = 8e8, 100.0


@dataclass
class Traits:
    """Facts about a model."""

    num_modules: int  # with weights, which are no embeddings
    num_weights: int  # of these modules
    num_trained: int  # of all weights, embeddings included
    depends_on_passes: bool
    reads_padding: bool | None = None  # None until texts with padding come

    def overhead(self, is_cpu: bool) -> float:
        """The tokens that cost as much as one more forward and backward pass: 4,000 for MiniLM on
        a GPU, 1,100 for BERT base, 130 for a decoder of 7 billion weights, 30 for its LoRA."""
        launch, gradient = OF_CPU if is_cpu else OF_DEVICES
        cost = launch * self.num_modules + gradient * self.num_trained
        return max(1.0, cost / max(1, self.num_weights))


_KNOWN: WeakKeyDictionary[nn.Module, Traits] = WeakKeyDictionary()


def traits_of(encoder: nn.Module) -> Traits:
    """The traits of the model in the wrappers of DDP and torch.compile."""
    model = unwrapped(encoder)
    if model not in _KNOWN:
        inner = [x for x in model.modules() if not isinstance(x, nn.Embedding)]
        weights = [[p.numel() for p in x.parameters(recurse=False)] for x in inner]
        trained = [p.numel() for x in inner for p in x.parameters(recurse=False) if p.requires_grad]
        for table in model.modules():
            if isinstance(table, nn.Embedding) and table.weight.requires_grad:
                # not the rows of its weight, of which trimmed_vocabulary keeps some
                trained.append(table.num_embeddings * table.embedding_dim)
        _KNOWN[model] = Traits(
            num_modules=sum(bool(numbers) for numbers in weights),
            num_weights=sum(map(sum, weights)),
            num_trained=sum(trained),
            depends_on_passes=any(isinstance(x, BY_PASS) for x in inner),
        )
    return _KNOWN[model]


def reads_padding(encoder: nn.Module, pairs: Iterable[tuple[Features, Features]]) -> bool:
    """Whether the embedding of a text depends on its padding, by pairs of the features of a short
    text without and with padding. Ranks that share passes decide alike.

    It is measured once, and in the meantime False: then no text of a batch has padding.
    """
    traits = traits_of(encoder)
    if traits.reads_padding is None:
        pairs = list(pairs)
        widths = [[x["input_ids"].shape[1] for x in pair] for pair in pairs]
        if not largest_of_ranks(encoder, any(short < wide for short, wide in widths)):
            return False
        found = [_differ(encoder, *pair) for pair in pairs]  # as many passes on each rank
        traits.reads_padding = bool(largest_of_ranks(encoder, any(found)))
        if traits.reads_padding:
            logger.warning(
                "The embeddings of this model change with the padding of its texts, or it refuses"
                " texts without padding. So texts are not grouped by length: all losses embed them"
                " as sentence-transformers does."
            )
    return traits.reads_padding


@torch.no_grad()
def _differ(encoder: nn.Module, short: Features, wide: Features) -> bool:
    """Whether two features of one text have two embeddings, or the model raises. It leaves no trace
    in the model, in random numbers, and in compiled code."""
    model = unwrapped(encoder)
    engine = engine_of(encoder)  # which gathers weights in its own forward
    # not an instance's forward, around which a Trainer puts autocast
    forward = encoder if engine else partial(type(model).forward, model)
    device = short["input_ids"].device
    random = RandContext(short["input_ids"])
    with (
        keeps_modes(model),
        warnings.catch_warnings(),
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device.type, enabled=False),
    ):
        warnings.simplefilter("ignore")  # gradient checkpointing warns without gradients
        try:
            model.train()  # in which some models refuse lengths
            with random:
                forward(dict(short))
            model.eval()
            with random:
                alone = forward(dict(short))["sentence_embedding"]
            with random:
                padded = forward(dict(wide))["sentence_embedding"]
        except Exception:
            return True
    dtypes = {x.dtype for x in (alone, *model.parameters()) if x.is_floating_point()}
    dtypes |= {torch.bfloat16} if engine else {torch.float32}
    rounding = math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))  # 3e-4 in float32
    difference = (padded.float() - alone.float()).norm()
    return not difference <= rounding * alone.float().norm()
