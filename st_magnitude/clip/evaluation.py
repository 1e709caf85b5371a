"""Retrieval with image and text features."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.data.task import best_documents, check_finite
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.similarity import COSINE, DOT

NEAREST = 10  # irrelevant items of a query, with which the relevant ones are compared


def evaluate_retrieval(
    image_features: Tensor | np.ndarray,
    text_features: Tensor | np.ndarray,
    relevant: Tensor | np.ndarray | None = None,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Recall of image-to-text and text-to-image retrieval, and the norms of both sides, with the
    Cohen's d of the magnitude paper (arXiv 2602.09229, Table 6).

    R@k is the share of queries with a relevant item among their k best; ties go to the lower
    index. Queries without a relevant item are left out.

    Args:
        image_features: Raw image features, (n, D), as ``model.encode_image(images)`` gives them.
        text_features: Raw text features, (m, D).
        relevant: Whether text j belongs to image i: (n, m) booleans. With None, text i does.
        ks: Cutoffs of the recall.

    Returns:
        ``{cosine,dot}_{i2t,t2i}_recall@{k}`` in [0, 1];
        ``{image,text}_{norm_mean,norm_cv,mean_cosine,isoscore}``; ``{image,text}_cohens_d`` of the
        norms of relevant items, once for each of their queries, minus those of the ten nearest
        irrelevant items of each query by cosine, left out where either group has fewer than two.

    Raises:
        ValueError: If shapes do not fit, no pair is relevant, relevant is not boolean, a cutoff is
            not a whole number from 1 on, or features are not finite.

    Example:
        >>> images = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])
        >>> texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> found = evaluate_retrieval(images, texts, ks=(1,))
        >>> round(found["cosine_t2i_recall@1"], 4), round(found["dot_t2i_recall@1"], 4)
        (1.0, 0.3333)
    """
    given = {"image": image_features, "text": text_features}
    sides = {name: torch.as_tensor(x).detach() for name, x in given.items()}
    shapes = [tuple(x.shape) for x in sides.values()]
    if [len(shape) for shape in shapes] != [2, 2] or shapes[0][1] != shapes[1][1]:
        raise ValueError(f"Features must be of shapes (n, D) and (m, D); got {shapes}.")
    if not ks or not all(isinstance(k, Integral) and k >= 1 for k in ks):
        raise ValueError(f"ks must be whole numbers of at least 1, such as [1, 5]; got {ks}.")
    numbers = shapes[0][0], shapes[1][0]
    pairs = torch.eye(numbers[0], dtype=torch.bool) if relevant is None else relevant
    matches = torch.as_tensor(pairs, device="cpu").numpy()
    if matches.dtype != bool or not matches.any() or matches.shape != numbers:
        raise ValueError(
            f"relevant must be booleans of shape (images, texts), {numbers}, of which one is true,"
            f" such as grades > 0; got {matches.dtype} of shape {matches.shape} with"
            f" {int((matches != 0).sum())} pairs."
        )
    metrics: dict[str, float] = {}
    ways = {"i2t": ("image", "text", matches), "t2i": ("text", "image", matches.T)}
    for way, (queries, items, belongs) in ways.items():
        asked = belongs.any(axis=1)
        features = sides[queries][torch.from_numpy(asked)]
        check_finite(features, "query")
        check_finite(sides[items], "document")
        depth = max(*ks, NEAREST + int(belongs.sum(axis=1).max()))
        found = best_documents(features, sides[items], [COSINE, DOT], depth)
        tops = {name: top.numpy() for name, (top, _) in zip(("cosine", "dot"), found, strict=True)}
        for name, top in tops.items():
            hits = np.take_along_axis(belongs[asked], top, axis=1)
            for k in ks:
                metrics[f"{name}_{way}_recall@{k}"] = float(hits[:, :k].any(axis=1).mean())
        is_irrelevant = ~np.take_along_axis(belongs[asked], tops["cosine"], axis=1)
        is_near = is_irrelevant & (is_irrelevant.cumsum(axis=1) <= NEAREST)
        norms = geometry.norms(sides[items])
        groups = norms[belongs.nonzero()[1]], norms[tops["cosine"][is_near]]
        if min(map(len, groups)) > 1:
            metrics[f"{items}_cohens_d"] = geometry.cohens_d(*groups)
    return metrics | geometry_figures(sides)
