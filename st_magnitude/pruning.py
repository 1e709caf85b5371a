"""NormPruning: keeps the tokens of a document whose norm is above one threshold for the whole
index."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import BaseTokenPooling
from torch import Tensor

from st_magnitude._checks import at_least
from st_magnitude.similarity import Similarity, at_least_float32

__all__ = ["NormPruning"]


class NormPruning(BaseTokenPooling):
    """Keeps the token vectors whose norm is above a threshold, and of each document at least the
    largest.

    For a MultiVectorEncoder whose document tokens keep their norm (``stm.prepare(model,
    "qnorm")``), trained with :class:`~st_magnitude.LateInteractionLoss`. It costs one comparison a
    token, and long documents without content keep few vectors. It is used in the three ways of
    sentence-transformers' token pooling: ``token_pooling=`` of ``encode_document``;
    ``pooling.pool(embeddings)`` for vectors that are encoded already; as the last module of a
    model, which then loads as ``MultiVectorEncoder(path, trust_remote_code=True)`` where this
    package is installed.

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
        sample: int = 2000,
        exponent: float = 0.75,
        **encode: Any,
    ) -> NormPruning:
        """Finds the threshold above which a share of all token vectors lies.

        Args:
            model: A MultiVectorEncoder whose document tokens keep their norm, without another
                pooling.
            corpus: Documents.
            share: Share of the vectors to keep, in (0, 1]. Documents that would keep none keep one
                in addition.
            sample: Number of documents to encode, drawn from the corpus with a fixed seed.
            exponent: As for the class.
            **encode: Options of ``model.encode_document``, such as ``batch_size``; it shows a
                progress bar.

        Raises:
            ValueError: If share is out of range, or all token vectors have the same norm.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share must lie in (0, 1]; got {share}.")
        texts = list(corpus)
        if len(texts) > sample:
            texts = random.Random(0).sample(texts, sample)
        embeddings = model.encode_document(texts, **{"show_progress_bar": True} | encode)
        norms, _ = torch.cat(
            [torch.as_tensor(x).float().norm(dim=1).cpu() for x in embeddings]
        ).sort(descending=True)
        if norms[0] - norms[-1] <= 1e-3 * norms[0]:
            raise ValueError(
                "All document tokens of this model have the same norm, which says nothing of their"
                " importance. Train it with LateInteractionLoss after stm.prepare(model, 'qnorm')."
            )
        kept = round(share * len(norms))
        return cls(0.0 if kept == len(norms) else norms[kept].item(), exponent=exponent)

    def pool_one(self, embedding: Tensor, **kwargs: Any) -> Tensor:
        """Tokens (n, D) of one document -> (m, D), 1 <= m <= n."""
        if len(embedding) == 0:
            return embedding
        norms = torch.linalg.vector_norm(at_least_float32(embedding), dim=-1)
        keep = norms > self.threshold
        keep[norms.argmax()] = True
        return self._similarity.document(embedding[keep]).to(embedding.dtype)

    def chart(self, model: MultiVectorEncoder, text: str, width: int = 30, **encode: Any) -> str:
        """A bar for the norm of each token of a document, with a ``*`` at the tokens that are
        kept."""
        [features] = model.encode_document([text], output_value=None, **encode)
        mask = features["attention_mask"].bool()
        names = model.tokenizer.convert_ids_to_tokens(features["input_ids"][mask].tolist())
        norms = features["token_embeddings"][mask].float().norm(dim=1)
        kept = (norms > self.threshold) | (norms == norms.max())
        column = max(map(len, names))
        bars = (norms / norms.max() * width).round().int().tolist()
        return "\n".join(
            f"{'*' if keep else ' '} {name:<{column}}  {norm:6.3f}  {'#' * bar}"
            for keep, name, norm, bar in zip(
                kept.tolist(), names, norms.tolist(), bars, strict=True
            )
        )
