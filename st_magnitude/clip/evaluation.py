"""Retrieval with image and text features in both directions, by cosine and by dot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from st_magnitude.data.task import EncodedTask
from st_magnitude.similarity import COSINE, DOT

__all__ = ["evaluate_retrieval"]


def evaluate_retrieval(
    image_features: Tensor, text_features: Tensor, relevant: Any = None, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Recall of image-to-text and text-to-image retrieval, and the norms of both sides.

    R@k is the share of queries with a relevant item among their k best; ties go to the lower index. Queries without a
    relevant item are left out. For zero-shot classification, pass the text features of the classes and ``ks=(1,)``:
    ``cosine_i2t_recall@1`` is the accuracy.

    Args:
        image_features: Raw image features, (n, D): ``model.encode_image(images)`` with ``normalize=False``, the default
            of open_clip.
        text_features: Raw text features, (m, D), likewise.
        relevant: Texts that belong to each image: (n, m) booleans. With None, image i belongs to text i.
        ks: Cutoffs of the recall.

    Returns:
        ``{cosine,dot}_{i2t,t2i}_recall@{k}`` in [0, 1]; ``{image,text}_norm_mean`` and ``{image,text}_norm_cv``, the
        standard deviation over the mean.

    Raises:
        ValueError: If shapes do not fit, or features are not finite.

    Example:
        >>> images, texts = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]]), torch.eye(3, 2)
        >>> texts[2] = 1.0
        >>> found = evaluate_retrieval(images, texts, ks=(1,))
        >>> round(found["cosine_t2i_recall@1"], 4), round(found["dot_t2i_recall@1"], 4)
        (1.0, 0.3333)

    Source: Radford et al., CLIP, 2021.
    """
    sides = {"image": image_features.detach(), "text": text_features.detach()}
    pairs = torch.eye(len(sides["image"])) if relevant is None else relevant
    matches = torch.as_tensor(pairs, dtype=torch.bool, device="cpu").numpy()
    if matches.shape != (expected := (len(sides["image"]), len(sides["text"]))):
        raise ValueError(
            f"relevant must have a row for each image and a column for each text, {expected}; got {matches.shape}."
        )
    metrics: dict[str, float] = {}
    for direction, queries, items, belongs in (("i2t", "image", "text", matches), ("t2i", "text", "image", matches.T)):
        asked = belongs.any(axis=1)
        columns = [np.flatnonzero(row).tolist() for row in belongs[asked]]
        task = EncodedTask(sides[queries][torch.from_numpy(asked)], sides[items], columns)
        for name, top in zip(("cosine", "dot"), task.tops([COSINE, DOT], max(ks)), strict=True):
            hits = task.hits(top)
            metrics |= {f"{name}_{direction}_recall@{k}": float(hits[:, :k].any(axis=1).mean()) for k in ks}
    for side, features in sides.items():
        norms = torch.linalg.vector_norm(features.cpu().double(), dim=1)
        metrics |= {f"{side}_norm_mean": norms.mean().item()}
        metrics |= {f"{side}_norm_cv": (norms.std(correction=0) / norms.mean()).item()}
    return metrics
