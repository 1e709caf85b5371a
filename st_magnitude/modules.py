"""Modules of saved models: ExponentNorm for embeddings, and NormPruning for tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Module
from sentence_transformers.multi_vector_encoder.modules import BaseTokenPooling
from torch import Tensor, nn

from st_magnitude._checks import at_least
from st_magnitude.similarity import Similarity, at_least_float32

__all__ = ["ExponentNorm", "NormPruning"]

SAMPLE = 2000  # documents, of which `NormPruning.fit` finds a threshold


class ExponentNorm(Module):
    """Divides embeddings by a power of their norm, for queries one and for documents another.

    It is the last module of a model whose exponents were learned
    (:class:`~st_magnitude.LearnableNormLoss`) or chosen between 0 and 1
    (:func:`~st_magnitude.calibrate_exponent`). Inner products of its outputs are the scores of
    ``Similarity(gamma_query, gamma_document)``, so the model's ``similarity_fn_name`` is ``"dot"``.

    ``encode_query`` and ``encode_document`` tell it the role; it treats text without a role (plain
    ``encode``) as a document. It leaves its input in ``features["raw_embedding"]``, where losses
    take it from.

    With ``truncate_dim`` a prefix of the embedding is divided by a power of its own norm, as if the
    embedding had been cut first. Losses train prefixes like this, and evaluators score them like
    this.

    Args:
        gamma_query: Exponent of the query norm in [0, 1].
        gamma_document: Exponent of the document norm in [0, 1].
        learnable: Whether the exponents are trained. They are stored as ``gamma = sigmoid(bias)``
            (arXiv 2602.09229, Eq. 7); the parameters are called biases because trainers exempt
            those from weight decay. An exponent of exactly 0 or 1 lies at the end of the sigmoid
            and cannot learn.

    :func:`st_magnitude.load` loads a model with this module, and so does
    ``trust_remote_code=True``.

    Example:
        >>> import torch
        >>> from st_magnitude.modules import ExponentNorm
        >>> norm = ExponentNorm(gamma_query=1.0, gamma_document=0.5)
        >>> embedding = torch.tensor([[0.0, 4.0]])
        >>> norm({"sentence_embedding": embedding}, task="query")["sentence_embedding"]
        tensor([[0., 1.]])
        >>> norm({"sentence_embedding": embedding}, task="document")["sentence_embedding"]
        tensor([[0., 2.]])
    """

    forward_kwargs = {"task"}  # noqa: RUF012
    config_keys: list[str] = ["gamma_query", "gamma_document", "learnable"]  # noqa: RUF012

    def __init__(
        self, gamma_query: float = 0.5, gamma_document: float = 0.5, learnable: bool = False
    ) -> None:
        super().__init__()
        Similarity(gamma_query, gamma_document)  # checks the range
        self.learnable = learnable
        self.query_bias = nn.Parameter(_logit(gamma_query), requires_grad=learnable)
        self.document_bias = nn.Parameter(_logit(gamma_document), requires_grad=learnable)

    @property
    def similarity(self) -> Similarity:
        """The similarity of the raw embeddings at the current exponents, differentiable in them."""
        return Similarity(torch.sigmoid(self.query_bias), torch.sigmoid(self.document_bias))

    @property
    def gamma_query(self) -> float:
        return self.similarity.exponents[0]

    @property
    def gamma_document(self) -> float:
        return self.similarity.exponents[1]

    def forward(
        self, features: dict[str, Any], task: str | None = None, **kwargs: object
    ) -> dict[str, Any]:
        raw: Tensor = features["sentence_embedding"]
        role = task or features.get("task")
        # Losses take the exponents from the module. DistributedDataParallel (the Trainer's, with
        # find_unused_parameters=True) believes that they are used only if both are in the output.
        exponents = torch.sigmoid(torch.stack([self.query_bias, self.document_bias]))
        output = features | {
            "raw_embedding": raw,
            "exponents": exponents.expand(len(raw), 2),
            "sentence_embedding": _divided(raw, self.similarity, role),
        }
        return output if self.training else _CutFirst(output | {"task": role})

    def save(
        self, output_path: str, *args: object, safe_serialization: bool = True, **kwargs: object
    ) -> None:
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(  # type: ignore[override]
        cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any
    ) -> ExponentNorm:
        hub_options = ("token", "cache_folder", "revision", "local_files_only")
        place = {key: kwargs[key] for key in hub_options if key in kwargs}
        place["subfolder"] = subfolder
        config = cls.load_config(model_name_or_path, **place)
        module = cls(**{key: config[key] for key in cls.config_keys if key in config})
        return cls.load_torch_weights(model_name_or_path, model=module, **place)


class _CutFirst(dict[str, Any]):
    """Features in which a prefix of the divided embedding becomes that of the raw one, divided.

    ``encode`` applies ``truncate_dim`` after all modules, and no module is told of it:
    ``features["sentence_embedding"] = features["sentence_embedding"][..., :truncate_dim]``. That
    would leave the prefix divided by a power of the norm of all dimensions.

    All that it needs is among its items, and its constructor is that of dict: accelerate, which
    converts the output of a model in half precision, makes a new one of the converted items.
    """

    def __setitem__(self, name: str, value: object) -> None:
        if name == "sentence_embedding" and _is_prefix(value, self.get(name)):
            prefix = self["raw_embedding"][..., : value.shape[-1]]
            query, document = self["exponents"][0]
            value = _divided(prefix, Similarity(query, document), self["task"])
        super().__setitem__(name, value)


def _divided(raw: Tensor, similarity: Similarity, role: str | None) -> Tensor:
    """Raw embeddings (n, D) as they enter the inner product, in their own precision."""
    side = similarity.query if role == "query" else similarity.document
    return side(raw).to(raw.dtype)


def _is_prefix(value: object, embedding: object) -> TypeGuard[Tensor]:
    """Whether a tensor is a view of the first dimensions of an embedding."""
    if not (isinstance(value, Tensor) and isinstance(embedding, Tensor)):
        return False
    return value.data_ptr() == embedding.data_ptr() and value.shape[-1] < embedding.shape[-1]


def _logit(gamma: float) -> Tensor:
    if gamma in (0.0, 1.0):
        return torch.tensor(math.inf if gamma else -math.inf)
    return torch.tensor(math.log(gamma / (1 - gamma)))


class NormPruning(BaseTokenPooling):
    """Keeps the token vectors whose norm is above a threshold, and of each document the largest.

    For a MultiVectorEncoder whose document tokens keep their norm (``stm.prepare(model,
    "qnorm")``), trained with :class:`~st_magnitude.LateInteractionLoss`. Long documents without
    content keep few vectors. docs/late_interaction.md shows its three uses: for a call, for vectors
    that you have, and as the last module of a model.

    Args:
        threshold: Norm of a raw token vector from which it is kept.
        exponent: Exponent in [0, 1] of the kept vectors, d / |d|^exponent; choose it on validation
            data. At 0 they are raw, and a token of large norm may win too often; at 1 the norm
            decides what is kept and nothing else, as stores that normalise vectors and
            HierarchicalTokenPooling need it.
        tasks: Tasks whose tokens are pruned; None: documents.

    Raises:
        ValueError: If the threshold is negative, or the exponent lies outside [0, 1].

    Example:
        >>> import torch
        >>> from st_magnitude import NormPruning
        >>> document = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0]])  # norms 5, 0.5 and 2
        >>> NormPruning(threshold=1.0, exponent=1.0).pool([document])
        [tensor([[0.6000, 0.8000],
                [0.0000, 1.0000]])]
    """

    config_keys: list[str] = ["threshold", "exponent", "tasks"]  # noqa: RUF012

    def __init__(
        self, threshold: float, *, exponent: float = 0.75, tasks: str | list[str] | None = None
    ) -> None:
        super().__init__(tasks=tasks)
        at_least("threshold", threshold, 0)
        self._similarity = Similarity(document=exponent)
        self.threshold, self.exponent = float(threshold), float(exponent)

    @classmethod
    def fit(
        cls,
        model: MultiVectorEncoder,
        corpus: Sequence[str],
        share: float = 0.15,
        *,
        exponent: float = 0.75,
        **encode: Any,
    ) -> NormPruning:
        """Finds the threshold above which a share of all token vectors lies.

        Args:
            model: A MultiVectorEncoder whose document tokens keep their norm, without pooling.
            corpus: Documents, of which it encodes 2,000, drawn with a fixed seed.
            share: Share of the vectors to keep, in (0, 1]. Documents that would keep none keep one
                in addition.
            **encode: Options of ``model.encode_document``, such as ``batch_size``; it shows a
                progress bar.

        Raises:
            ValueError: If share is out of range, or all token vectors have the same norm.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share must lie in (0, 1]; got {share}.")
        texts = list(corpus)
        texts = random.Random(0).sample(texts, min(len(texts), SAMPLE))
        embeddings = model.encode_document(texts, **{"show_progress_bar": True} | encode)
        norms = torch.cat([torch.as_tensor(x).float().norm(dim=1).cpu() for x in embeddings])
        norms, _ = norms.sort(descending=True)
        if norms[0] - norms[-1] <= 1e-3 * norms[0]:
            raise ValueError(
                "All document tokens of this model have the same norm, which says nothing of their"
                " importance. Train it with LateInteractionLoss after stm.prepare(model, 'qnorm')."
            )
        kept = round(share * len(norms))
        return cls(0.0 if kept == len(norms) else norms[kept].item(), exponent=exponent)

    def pool_one(self, embedding: Tensor, **kwargs: object) -> Tensor:
        """Tokens (n, D) of one document -> (m, D), 1 <= m <= n."""
        if len(embedding) == 0:
            return embedding
        norms = torch.linalg.vector_norm(at_least_float32(embedding), dim=-1)
        keep = norms > self.threshold
        keep[norms.argmax()] = True
        return self._similarity.document(embedding[keep]).to(embedding.dtype)
