"""Retrieval, geometry and zero-shot classification with image and text features, by cosine and by dot.

Features are raw: ``model.encode_image(images)`` and ``model.encode_text(texts)`` with ``normalize=False``, which is the
default of both. This module does not need open_clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import skew
from torch import Tensor

from st_magnitude.data.task import TILE, check_finite, rank
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.geometry import coefficient_of_variation, norms, spearman
from st_magnitude.geometry.magnitude import counted_cohens_d
from st_magnitude.similarity import COSINE, DOT, Similarity

__all__ = ["RetrievalReport", "retrieval_report", "zero_shot"]

Array = NDArray[np.float64]

SIMILARITIES = {"cosine": COSINE, "dot": DOT}
DIRECTIONS = {"i2t": ("image", "text"), "t2i": ("text", "image")}  # side of the queries, side of the items
HUB_K = 10  # neighbours that count for hubness, and irrelevant items of the "hard" pairing


@dataclass(frozen=True)
class RetrievalReport:
    """The result of :func:`retrieval_report`. ``print`` shows it as a table, and names of metrics index it.

    Attributes:
        metrics: Values by name; nan where a metric is not defined.

            - ``{cosine,dot}_{i2t,t2i}_recall@{k}``, ``{cosine,dot}_{i2t,t2i}_map``: in [0, 1];
            - ``{image,text}_{hard,corpus,pairs}_d``: Cohen's d between the norms of relevant and irrelevant items;
            - ``{image,text}_norm_mean``, ``{image,text}_norm_cv``;
            - ``{cosine,dot}_{image,text}_hub_skew``: skewness of N_10, the number of queries that find an item;
            - ``{cosine,dot}_{image,text}_hub_norm``: Spearman correlation of N_10 and norm.
        reasons: The reason for every metric that is nan.
        norms: Norms of ``"image"``, (n,), and of ``"text"``, (m,).
        occurrence: N_10 of every item, by ``(similarity, side)``.
        num_images: Number n of images.
        num_texts: Number m of texts.
        num_relevant: Number of pairs that belong together.
        ks: Cutoffs of the recalls.
        notes: Remarks on the features.
    """

    metrics: dict[str, float]
    reasons: dict[str, str] = field(repr=False)
    norms: dict[str, Array] = field(repr=False)
    occurrence: dict[tuple[str, str], NDArray[np.int64]] = field(repr=False)
    num_images: int
    num_texts: int
    num_relevant: int
    ks: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        if name not in self.metrics:
            raise KeyError(f"There is no metric {name!r}; choose one of {', '.join(self.metrics)}.")
        return self.metrics[name]

    def __str__(self) -> str:
        columns = [f"recall@{k}" for k in self.ks] + ["map"]
        width = 7 * len(columns)
        lines = [
            f"{self.num_images:,} images, {self.num_texts:,} texts, {self.num_relevant:,} relevant pairs",
            "",
            f"{'in %':<24}{'image -> text':>{width}}{'text -> image':>{width}}",
            " " * 24 + "".join(f"{c.replace('recall', 'R').replace('map', 'MAP'):>7}" for c in columns) * 2,
        ]
        for name in SIMILARITIES:
            cells = [self.metrics[f"{name}_{direction}_{c}"] for direction in DIRECTIONS for c in columns]
            lines.append(f"{name:<24}" + "".join(f"{100 * cell:>7.1f}" for cell in cells))
        lines += ["", f"{'':<24}{'image':>10}{'text':>10}"]
        rows = {"mean norm": "{}_norm_mean", "CV of norms": "{}_norm_cv"}
        rows |= {f"Cohen's d, {pairing}": f"{{}}_{pairing}_d" for pairing in ("hard", "corpus", "pairs")}
        for name in SIMILARITIES:
            rows |= {
                f"{name}: skewness of N_10": f"{name}_{{}}_hub_skew",
                f"{name}: N_10 ~ norm": f"{name}_{{}}_hub_norm",
            }
        shown: dict[str, str] = {}  # a reason and its mark
        for label, key in rows.items():
            line = f"{label:<24}"
            for side in ("image", "text"):
                name = key.format(side)
                if name in self.reasons:
                    mark = shown.setdefault(self.reasons[name], f"[{len(shown) + 1}]")
                    line += f"{'- ' + mark:>10}"
                else:
                    line += f"{self.metrics[name]:>10.3f}"
            lines.append(line)
        lines += [f"{mark} {reason}" for reason, mark in shown.items()]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def retrieval_report(
    image_features: Any, text_features: Any, relevance: Any = None, ks: Sequence[int] = (1, 5, 10)
) -> RetrievalReport:
    """Measures retrieval in both directions by cosine and by dot, and how it depends on the norms.

    - R@k is the share of queries with a relevant item among their k best. MAP is the mean over queries of the mean
      precision at the ranks of the relevant items. Ties go to the lower index. Queries without a relevant item are
      left out.
    - Cohen's d is the difference between the mean norms of relevant and irrelevant items of a side in standard
      deviations, in three pairings. *hard*: the relevant items of each query against its 10 nearest irrelevant ones by
      cosine. *corpus*: items that are relevant to something against items that are relevant to nothing. *pairs*: over
      all (query, item) pairs; if all items are relevant to equally many queries, both samples are the same and d would
      be 0 for any features, so that it is nan.
    - N_10 of an item counts the queries that have it among their 10 best. A large skewness means that a
      few hubs are in many lists; a negative correlation with the norm means that hubs have small norms.

    Args:
        image_features: Raw image features, (n, D).
        text_features: Raw text features, (m, D).
        relevance: Texts that belong to each image: an (n, m) array of booleans, or a tuple ``(image_ids, text_ids)`` of
            class ids, (n,) and (m,), where equal ids belong together. With None, image i belongs to text i.
        ks: Cutoffs of the recall.

    Raises:
        ValueError: If shapes do not fit, features are not finite, nothing is relevant, or ks are out of range.

    Example:
        >>> images, texts = [[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
        >>> report = retrieval_report(images, texts, ks=(1, 2))
        >>> report["cosine_t2i_recall@1"], report["dot_t2i_recall@1"]
        (1.0, 0.3333333333333333)

    Source: Radford et al., CLIP, 2021 (R@k); Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 8 and Table 6;
    Radovanović et al., Hubs in Space, JMLR 2010 (N_k).
    """
    x = {"image": _features("image_features", image_features), "text": _features("text_features", text_features)}
    if x["image"].shape[1] != x["text"].shape[1]:
        raise ValueError(
            f"Image and text features have {x['image'].shape[1]} and {x['text'].shape[1]} dimensions: pass "
            "features that encode_image and encode_text of one model return."
        )
    ks = tuple(ks)
    if not ks or any(isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1 for k in ks):
        raise ValueError(f"ks must be whole numbers of at least 1, such as (1, 5, 10); got {ks!r}.")
    image_text = _relevance(relevance, len(x["image"]), len(x["text"]))  # (n, m)
    metrics: dict[str, float] = {}
    reasons: dict[str, str] = {}
    occurrence: dict[tuple[str, str], NDArray[np.int64]] = {}
    item_norms = {side: norms(features) for side, features in x.items()}
    nearest: dict[str, NDArray[np.int64]] = {}  # number of queries whose hard irrelevant items include an item
    for name, similarity in SIMILARITIES.items():
        for direction, (asking, found) in DIRECTIONS.items():
            relevant = image_text if asking == "image" else image_text.T
            scored = _walk(x[asking], x[found], relevant, similarity, ks, with_hard=name == "cosine")
            metrics |= {f"{name}_{direction}_{key}": value for key, value in scored.metrics.items()}
            occurrence[name, found] = scored.occurrence
            if name == "cosine":
                nearest[found] = scored.hard
    for side in x:
        relevant = image_text if side == "text" else image_text.T  # of queries and items of this side
        metrics[f"{side}_norm_mean"] = float(item_norms[side].mean())
        metrics[f"{side}_norm_cv"] = coefficient_of_variation(item_norms[side])
        for pairing, d in _separations(item_norms[side], relevant.cpu().numpy(), nearest[side], side).items():
            name = f"{side}_{pairing}_d"
            metrics[name] = math.nan if isinstance(d, str) else d
            if isinstance(d, str):
                reasons[name] = d
    for name in SIMILARITIES:
        for side in x:
            n_10 = occurrence[name, side]
            key = f"{name}_{side}_hub"
            metrics[f"{key}_skew"] = metrics[f"{key}_norm"] = math.nan
            if np.ptp(n_10) == 0:
                reasons[f"{key}_skew"] = reasons[f"{key}_norm"] = (
                    f"N_{HUB_K} is {n_10[0]} for every item: more items than {HUB_K} are needed"
                )
                continue
            metrics[f"{key}_skew"] = float(skew(n_10))
            if np.ptp(item_norms[side]) <= 1e-6 * item_norms[side].max():
                reasons[f"{key}_norm"] = f"all {side} features have the same norm"
            else:
                metrics[f"{key}_norm"] = spearman(n_10, item_norms[side])
    notes = tuple(
        f"all {side} features have norm 1, which carries no information: encode with normalize=False to keep norms."
        for side in x
        if are_unit(item_norms[side])
    )
    num_relevant = int(image_text.sum())
    return RetrievalReport(
        metrics, reasons, item_norms, occurrence, len(x["image"]), len(x["text"]), num_relevant, ks, notes
    )


def zero_shot(image_features: Any, class_features: Any, labels: Any) -> dict[str, float]:
    """The share of images whose best class is the right one, by cosine and by dot.

    Args:
        image_features: Raw image features, (n, D). Their norms change no answer.
        class_features: Text features of the classes, (C, D), or their means over several prompts.
        labels: Row of ``class_features`` for each image, (n,) integers.

    Raises:
        ValueError: If shapes do not fit, features are not finite, or a label has no class.

    Example:
        >>> zero_shot([[1.0, 0.2], [0.1, 1.0]], [[9.0, 0.0], [0.0, 0.5]], labels=[0, 1])
        {'cosine': 1.0, 'dot': 0.5}

    Source: Radford et al., CLIP, 2021, section 3.1.
    """
    images, classes = _features("image_features", image_features), _features("class_features", class_features)
    wanted = torch.as_tensor(np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels))
    if images.shape[1] != classes.shape[1]:
        raise ValueError(f"Image and class features have {images.shape[1]} and {classes.shape[1]} dimensions.")
    if wanted.shape != (len(images),) or wanted.is_floating_point() or wanted.dtype == torch.bool:
        raise ValueError(
            f"labels must be {len(images)} integers, one per image; got {wanted.dtype} of shape {tuple(wanted.shape)}."
        )
    if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(classes):
        raise ValueError(
            f"labels are rows of class_features, 0 to {len(classes) - 1}; got {int(wanted.min())} to "
            f"{int(wanted.max())}."
        )
    images, classes = images.cpu(), classes.cpu()
    return {
        name: float((rank(similarity(images, classes), 1)[:, 0] == wanted).double().mean())
        for name, similarity in SIMILARITIES.items()
    }


# --- inputs -----------------------------------------------------------------------------------------------------------


def _features(name: str, given: Any) -> Tensor:
    """Checked features, at least float32: (n, D)."""
    features = given.detach() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"{name} must be a matrix (n, D) of at least one row, got shape {tuple(features.shape)}.")
    features = features if features.dtype == torch.float64 else features.float()
    check_finite(features, name.removesuffix("_features"))
    return features


def _relevance(given: Any, n: int, m: int) -> Tensor:
    """Checked, as booleans (n, m)."""
    if given is None:
        if n != m:
            raise ValueError(
                f"Without relevance image i belongs to text i, but there are {n} images and {m} texts: pass "
                "relevance, an (n, m) array of booleans or (image_ids, text_ids)."
            )
        return torch.eye(n, dtype=torch.bool)
    if isinstance(given, tuple):
        if len(given) != 2 or (shapes := [np.shape(_array(ids)) for ids in given]) != [(n,), (m,)]:
            found = shapes if len(given) == 2 else f"{len(given)} of them"
            raise ValueError(f"(image_ids, text_ids) must be {n} and {m} class ids, got {found}.")
        image_ids, text_ids = (_array(ids) for ids in given)
        relevant = torch.from_numpy(image_ids[:, None] == text_ids)
    else:
        array = _array(given)
        if array.shape != (n, m):
            raise ValueError(
                f"relevance must have a row for each image and a column for each text, ({n}, {m}); got shape "
                f"{array.shape}. Pass class ids of both sides as a tuple, (image_ids, text_ids)."
            )
        if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
            raise ValueError("relevance must hold booleans; for graded judgments, pass grades > 0.")
        relevant = torch.from_numpy(array.astype(bool))
    if not relevant.any():
        raise ValueError("No text is relevant to any image: check the order of relevance and whether ids match.")
    return relevant


def _array(given: Any) -> NDArray[Any]:
    return given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass
class _Scored:
    metrics: dict[str, float]
    occurrence: NDArray[np.int64]  # N_10 of every item
    hard: NDArray[np.int64]  # how many queries have it among their 10 best irrelevant ones


def _walk(
    queries: Tensor, items: Tensor, relevant: Tensor, similarity: Similarity, ks: tuple[int, ...], with_hard: bool
) -> _Scored:
    """Ranks all items for every query, in tiles of rows: (n, D), (m, D), (n, m)."""
    num_items = len(items)
    occurrence, hard = (torch.zeros(num_items, dtype=torch.int64) for _ in range(2))
    recalls: dict[int, list[Tensor]] = {k: [] for k in ks}
    precisions = []
    ranks = torch.arange(1, num_items + 1, dtype=torch.float64)
    for rows in torch.arange(len(queries)).split(max(1, TILE // num_items)):
        tile = slice(int(rows[0]), int(rows[-1]) + 1)
        scores, wanted = similarity(queries[tile], items).cpu(), relevant[tile]  # (rows, m)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        occurrence += order[:, :HUB_K].flatten().bincount(minlength=num_items)
        hits = wanted.gather(1, order)
        asked = hits.any(dim=1)
        for k in ks:
            recalls[k].append(hits[asked, :k].any(dim=1))
        hits = hits[asked].double()
        precisions.append((hits.cumsum(dim=1) / ranks * hits).sum(dim=1) / hits.sum(dim=1))
        if with_hard:
            lists = order[asked][:, : HUB_K + int(wanted.sum(dim=1).max())]  # with 10 irrelevant items, if possible
            irrelevant = ~wanted[asked].gather(1, lists)
            irrelevant &= irrelevant.cumsum(dim=1) <= HUB_K
            hard += lists[irrelevant].bincount(minlength=num_items)
    metrics = {f"recall@{k}": float(torch.cat(found).double().mean()) for k, found in recalls.items()}
    metrics["map"] = float(torch.cat(precisions).mean())
    return _Scored(metrics, occurrence.numpy(), hard.numpy())


def _separations(
    item_norms: Array, relevant: NDArray[np.bool_], hard: NDArray[np.int64], side: str
) -> dict[str, float | str]:
    """Cohen's d of the norms of items by pairing, or the reason why it is not defined: (m,), (n queries, m), (m,)."""
    degrees = relevant.sum(axis=0)  # (m,)
    is_relevant = (degrees > 0).astype(int)
    other = "text" if side == "image" else "image"
    too_few = "fewer than two of them: d needs two of either kind"

    def d(relevant: NDArray[np.int64], irrelevant: NDArray[np.int64], why_undefined: str) -> float | str:
        enough = min(relevant.sum(), irrelevant.sum()) >= 2
        return counted_cohens_d(item_norms, relevant, irrelevant) if enough else why_undefined

    return {
        "hard": d(degrees, hard, f"of irrelevant {side}s there are {too_few}"),
        "corpus": d(
            is_relevant,
            1 - is_relevant,
            f"{is_relevant.sum()} of the {len(item_norms)} {side}s belong to some {other}, and d needs two that do and "
            "two that do not: add distractors",
        ),
        "pairs": d(degrees, len(relevant) - degrees, f"of irrelevant pairs there are {too_few}")
        if np.ptp(degrees)
        else f"every {side} belongs to equally many {other}s ({degrees[0]}), so that relevant and irrelevant pairs "
        "have the same norms and d is 0 for any features",
    }
