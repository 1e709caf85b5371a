"""The base of all losses: checks of the model and of a batch, and the scale."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.losses.adaptive_layer import TransformerDecorator
from sentence_transformers.sentence_transformer.losses.matryoshka import (
    CachedLossDecorator,
    ForwardDecorator,
)
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor, nn

from st_magnitude._checks import InputError, one_of, positive
from st_magnitude._distributed import engine_of, num_ranks
from st_magnitude._upstream import SINCE_6_2
from st_magnitude.kernel.terms import Term, check_terms, longest_prefix
from st_magnitude.losses.groups import Numbers, embed_in_groups
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import DNORM, DOT, QNORM, Similarity, at_least_float32
from st_magnitude.surgery.adapters import refuse_frozen
from st_magnitude.surgery.normalize import (
    append_exponents,
    set_similarity_function,
    strip_normalize,
    why_normalize_stays,
)
from st_magnitude.surgery.raw import (
    normalizes_output,
    output_width,
    raw_features,
    refuse_other_models,
    routes_of,
    unwrapped,
)

logger = logging.getLogger(__name__)

SMALLEST_NORM = 1e-6  # the mean of smaller ones is not divided by

CITATION = """
@misc{feng2026beyond,
    title={When Does Embedding Magnitude Matter? A Cross-Task Functional-Symmetry Framework},
    author={Xincan Feng and Taro Watanabe},
    year={2026},
    eprint={2602.09229},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""


def exponent_norm(model: nn.Module) -> ExponentNorm | None:
    """The ExponentNorm of a model, also inside the wrappers of DDP and torch.compile."""
    return next((module for module in model.modules() if isinstance(module, ExponentNorm)), None)


def half_weights(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights in less than float32."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    return [parameter for parameter in trained if parameter.element_size() < 4]


def is_table(model: nn.Module) -> bool:
    """Whether all sides of a model look embeddings up in a StaticEmbedding."""
    first = next(unwrapped(model).children(), None)
    sides = routes_of(first).values() if isinstance(first, Router) else [[first]]
    return all(map(has_static_embedding_input, sides))


def check_weights(model: nn.Module, name: str, engine: str | None = None) -> None:
    """Refuses a model that is frozen (`refuse_frozen`), and warns of weights in half precision."""
    refuse_frozen(unwrapped(model))
    half = half_weights(model)
    if half and engine is None:  # an engine keeps float32 copies of weights
        logger.warning(
            f"{name} trains weights in {str(half[0].dtype).removeprefix('torch.')}, which small"
            " steps hardly change: at 2e-5 most stay what they were. Call model.float() before you"
            " build the loss (for LoRA, cast the adapter alone), and train with bf16=True in the"
            " training arguments for speed."
        )


class EmbeddingLoss(nn.Module):
    """A loss of raw embeddings under a similarity: logits = s / (temperature · size).

    With ``scale="auto"`` the size is mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document), with
    the means over the queries and the positives of the batch at hand. Explicit negatives do not
    count: they would grow where positives shrink. The gradient of the means reaches the embeddings.
    The size is 1 for cosine, whose scale is ``unit``.

    A new model that sentence-transformers' Trainer assigns to ``model``, with ``model_init`` and in
    a hyperparameter search, is prepared as the first one was. The wrappers of DDP and torch.compile
    around the same model change nothing.

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 3.1, whose scale of 20 is meant
        for norms of 1.
    """

    citation = CITATION
    uses_gradient_cache = False
    learns_exponents = False
    model: SentenceTransformer

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: Similarity | str,
        scale: float | Literal["auto"],
        unit: float,
        group_by_length: bool = True,
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        refuse_other_models(model, self.name)
        positive("scale", scale, ["auto"])
        self.model = model
        one_of("group_by_length", group_by_length, (False, True))
        self.group_by_length = group_by_length
        self._similarity = Similarity.named(similarity)
        is_unit = scale == "auto" and not self.similarity.keeps_magnitude
        self.scale: float | Literal["auto"] = unit if is_unit else scale
        self._has_begun = False
        self._has_removed_normalize = False
        self.watch = FiniteWatch(self.name)
        # of the texts of each column of a batch, the rows (B,) in the order of forward passes
        self.order: list[Numbers] = []

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        before = vars(self).get("_modules", {}).get("model") if name == "model" else None
        super().__setattr__(name, value)
        if before is not None and isinstance(value, BaseModel) and value is not unwrapped(before):
            self.prepare_model()

    def prepare_model(self) -> None:
        """Checks the model, prepares it for the similarity, and starts a new run."""
        self.check_model()
        self._has_begun = False
        model = unwrapped(self.model)
        if not isinstance(model, SentenceTransformer):
            return
        similarity = self.similarity  # also that of an ExponentNorm after Normalize
        normalizes = self.uses_norms and normalizes_output(model)
        if normalizes:
            strip_normalize(model)
        append_exponents(model, similarity)
        set_similarity_function(model, similarity)
        if normalizes and not self._has_removed_normalize:
            self._has_removed_normalize = True
            logger.warning(
                f"{self.name} has removed Normalize from the end of the model, which is scored by"
                f" {model.similarity_fn_name} from now on;"
                ' stm.prepare(model, "cosine") puts it back.'
            )

    def check_model(self) -> None:
        """Refuses a model that the loss cannot train, before it changes it."""
        model = unwrapped(self.model)
        if not self.uses_norms or not normalizes_output(model):
            return
        if why := why_normalize_stays(model):
            is_named = self._similarity in (DOT, QNORM, DNORM)
            name = self._similarity.name
            call = f"prepare(model, {name!r})" if is_named else "strip_normalize(model)"
            raise InputError(
                f"{self.name} learns from the norm of embeddings, but this model ends in Normalize"
                f" {why}, where the loss does not remove it by itself. Call stm.{call} before you"
                " build the loss."
            )
        if not self.learns_exponents:  # which can be all that is learned
            refuse_frozen(model)

    @property
    def similarity(self) -> Similarity:
        return self._similarity

    @property
    def uses_norms(self) -> bool:
        """Whether the loss of embeddings changes with their norms."""
        return self.similarity.keeps_magnitude

    def embed(self, columns: list[dict[str, Tensor]]) -> list[Tensor]:
        """The raw embeddings of each column of texts, (B, D)."""
        model: Any = partial(raw_features, self.model)
        self.order = []
        if not self.group_by_length:
            return embed_columns(model, columns)
        if all(features.keys() == {"input_ids", "offsets"} for features in columns):
            # a static table, whose dense gradient is as large as the table for each pass
            tokens, first = ([x[name] for x in columns] for name in ("input_ids", "offsets"))
            starts = accumulate(map(len, tokens), initial=0)  # of the columns
            offsets = torch.cat([x + start for x, start in zip(first, starts, strict=False)])
            joined = model({"input_ids": torch.cat(tokens), "offsets": offsets})
            return list(joined["sentence_embedding"].split([len(x) for x in first]))
        if self.has_adaptive_layers():  # which reads on from the features of each column
            return [model(features)["sentence_embedding"] for features in columns]
        embeddings, self.order = embed_in_groups(model, columns, self.model)
        return embeddings

    def start(self) -> None:
        """On the first batch of a run, checks the engine and the weights, and warns if the saved
        model will score in another way than the loss trains it to, as the loss that was built last
        decides."""
        if self._has_begun or not torch.is_grad_enabled():
            return
        self._has_begun = True
        model = unwrapped(self.model)
        engine = engine_of(self.model)
        self.check_engine(engine)
        check_weights(model, self.name, engine)
        if not isinstance(model, SentenceTransformer):
            return
        norm = exponent_norm(model)
        query, document = self.similarity.exponents
        saved = float(model.similarity_fn_name == "cosine") if norm is None else norm.gamma_document
        if not math.isclose(document, saved, abs_tol=1e-6):
            logger.warning(
                f"{self.name} trains with a document exponent of {document:.3g}, but the model is"
                f" saved for an exponent of {saved:.3g}, so it will not score as this loss trains"
                " it. Give all losses of a Trainer the same similarity, and call"
                f" stm.prepare(model, Similarity({query:.3g}, {document:.3g})) before you build"
                " them."
            )

    def check_engine(self, engine: str | None) -> None:
        """Refuses ranks, and an engine, as engine_of names it, that would train the loss wrongly,
        fail, or wait forever."""
        if self.uses_gradient_cache and num_ranks() > 1 and not SINCE_6_2:
            raise InputError(
                f"{self.name} with mini_batch_size on {num_ranks()} processes would wait forever"
                " where one has more texts than another. Install sentence-transformers 6.2 or"
                " later, or leave mini_batch_size out."
            )
        if engine is None:
            return
        if self.learns_exponents and engine != "DeepSpeed ZeRO-2":
            # Scalars cannot be sharded, and a loss takes them outside of the model's forward.
            why = f"learns exponents, each a single number, and {engine} shards all parameters"
            how = "fix them: MagnitudeRankingLoss(model, stm.Similarity(1, 0.5))"
        elif self.uses_gradient_cache and engine.startswith("DeepSpeed"):
            # "Gradient computed twice for this partition": sentence-transformers, issue 3173
            why = f"caches gradients in several backward passes a step, and {engine} allows one"
            how = "leave mini_batch_size out"
        else:
            return
        raise InputError(
            f"{self.name} {why}. Use DistributedDataParallel (torchrun, without"
            f" {engine.split()[0]}), or {how}."
        )

    def get_config_dict(self) -> dict[str, object]:
        gamma_query, gamma_document = self.similarity.exponents
        return {
            "similarity": {"query": gamma_query, "document": gamma_document},
            "scale": self.scale,
            "group_by_length": self.group_by_length,
        }

    def get_log(self) -> dict[str, float]:
        """Figures for a line of the Trainer's log, which may wait for the device."""
        return {}

    def has_adaptive_layers(self) -> bool:
        """Whether sentence-transformers' ``AdaptiveLayerLoss`` is around the loss."""
        first = next(unwrapped(self.model).children(), None)
        return isinstance(getattr(first, "forward", None), TransformerDecorator)

    def refuse_matryoshka(self, advice: str) -> None:
        """Refuses sentence-transformers' ``MatryoshkaLoss`` around the loss."""
        is_wrapped = isinstance(getattr(self.model, "forward", None), ForwardDecorator)
        if is_wrapped or isinstance(vars(self).get("calculate_loss"), CachedLossDecorator):
            raise InputError(
                "sentence-transformers' MatryoshkaLoss normalises every prefix. It takes no loss"
                f" that learns from norms, has regularizers or has prefixes of its own. {advice}"
            )

    def refuse_unequal(self, sizes: Sequence[int]) -> None:
        if len(set(sizes)) > 1:
            raise InputError(
                f"The columns of a batch must have equally many texts, but have {tuple(sizes)}."
            )

    def check_dims(self, terms: Sequence[Term]) -> None:
        """Refuses prefixes that are too long, and warns if no term compares all dimensions."""
        width = output_width(self.model)
        check_terms(terms, width or math.inf)
        longest = longest_prefix(terms)
        if width is not None and longest is not None and longest < width:
            logger.warning(
                f"No term of {self.name} compares all {width} dimensions, so those beyond {longest}"
                f" are not trained. Add a term with dim={width}."
            )

    def by_mean_norms(
        self,
        columns: list[Tensor],
        similarity: Similarity,
        longest: int | None = None,
        gathers: bool = False,
    ) -> list[Tensor]:
        """Divides the queries (B, D) of the first column, and the documents of the others, by the
        mean norms of queries and of positives, over all ranks if the loss ``gathers``.

        Norms are those of the ``longest`` prefix. Dividing x by mean|x| divides s by
        mean|x|^(1 - gamma), for learned exponents too.
        """
        if self.scale != "auto":
            return columns
        sides = (columns[:1], similarity.gamma_query), (columns[1:], similarity.gamma_document)
        found = []
        for side, gamma in sides:
            if isinstance(gamma, Tensor) or gamma != 1:  # else the similarity removes the norm
                side = [at_least_float32(x) for x in side]
                norms = torch.linalg.vector_norm(side[0][:, :longest], dim=1)
                total = torch.stack([norms.sum(), torch.ones_like(norms).sum()])  # (2,)
                if gathers and num_ranks() > 1:
                    total = all_gather_with_grad(total[None]).sum(dim=0)
                mean = total[0] / total[1]
                # without norms there is no size, and a division would make gradients overflow
                mean = torch.where(mean > SMALLEST_NORM, mean, torch.ones_like(mean))
                side = [x / mean for x in side]
            found += side
        return found


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, which does not wait for a GPU: it has zeros until the numbers come."""
    found = torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return found.copy_(x, non_blocking=x.is_cuda)


class FiniteWatch:
    """Warns once if embeddings or losses are not finite, and refuses such labels; on a GPU at the
    next batch, which keeps the host from waiting."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._has_warned = False
        self._found: tuple[list[str], Tensor] | None = None  # names and flags of a batch

    def __call__(
        self, embeddings: Sequence[Tensor], labels: Tensor | None, losses: Mapping[str, Tensor]
    ) -> None:
        """Looks at embeddings (B, D) of each column, labels of any shape, and losses by name."""
        if self._has_warned or not torch.is_grad_enabled():
            return
        # Anything else that is not finite reaches the losses. A GPU would be waited for.
        if all(loss.is_cpu and math.isfinite(loss.detach()) for loss in losses.values()):
            return
        number = len(embeddings)
        watched = {f"text column {i} of {number}": x for i, x in enumerate(embeddings, start=1)}
        if labels is not None:
            watched["the labels"] = labels
        watched |= losses
        broken = torch.stack([~x.detach().isfinite().all() for x in watched.values()])
        before, self._found = self._found, (list(watched), to_host(broken))
        ready = before if broken.is_cuda else self._found
        if ready is None:
            return
        names, flags = ready
        found = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        if "the labels" in found:
            raise InputError(
                f"{self.name} got a label or a teacher's value that is nan or infinite, which makes"
                " all weights nan. Remove such rows from the data, and start anew or from a"
                " checkpoint."
            )
        if found:
            self._has_warned = True
            logger.warning(
                f"{self.name} is not finite: nan or infinity is in {', '.join(found)}. If a text"
                " column is named, look for empty or damaged texts in it, a learning rate that is"
                " too high, or an overflow in float16; else look at the regularizers and the"
                " scale."
            )
