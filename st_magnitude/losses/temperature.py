"""Ranking losses with several temperatures, several prefixes, or a temperature for every prefix.

A high temperature lowers the intrinsic dimension, so less is lost when embeddings are truncated or
binarised. All terms together cost about as much as one. Every other loss takes them as ``terms=``.

Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in
    Contrastive Training, ICLR 2025, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sentence_transformers import SentenceTransformer
from typing_extensions import Unpack

from st_magnitude._checks import InputError, prefix_dims
from st_magnitude.kernel.terms import Term
from st_magnitude.losses.ranking import MagnitudeRankingLoss, RankingOptions
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import output_width, refuse_other_models

TEMPERATURES = (0.03, 0.06, 0.1)  # the paper's, section 5

CITATION = """
@inproceedings{dinu2025effective,
    title={Effective Post-Training Embedding Compression via Temperature Control in Contrastive
        Training},
    author={Georgiana Dinu and Corey Barrett and Yi Xiang and Miguel Romero Calvo and Anna Currey
        and Xing Niu},
    booktitle={The Thirteenth International Conference on Learning Representations},
    year={2025}
}
"""


def temp_agg(temperatures: Iterable[float] = TEMPERATURES) -> tuple[Term, ...]:
    """The terms of :class:`TempAggLoss`: one for each temperature.

    Example:
        >>> temp_agg([0.03, 0.1])[0]
        Term(dim=None, temperature=0.03, weight=1.0)
    """
    return tuple(Term(None, temperature) for temperature in temperatures)


def temp_agg_mrl(
    dims: Iterable[int], temperatures: Iterable[float] = TEMPERATURES
) -> tuple[Term, ...]:
    """The terms of :class:`TempAggMRLLoss`: every prefix at every temperature.

    Example:
        >>> [(term.dim, term.temperature) for term in temp_agg_mrl([64, 128], [0.03, 0.1])]
        [(64, 0.03), (64, 0.1), (128, 0.03), (128, 0.1)]
    """
    temperatures = tuple(temperatures)
    return tuple(Term(dim, tau) for dim in sorted(prefix_dims(dims)) for tau in temperatures)


class TempAggLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several temperatures.

        L = sum_t InfoNCE(tau_t)

    Args:
        model: The SentenceTransformer to train.
        temperatures: Temperatures tau_t, by default as in the paper.
        similarity: A Similarity or its name. ``scale="auto"`` stretches all temperatures by the
            same factor.
        **options: All other arguments of MagnitudeRankingLoss except ``terms``.

    Source: Dinu et al., ICLR 2025, Eq. 6.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        temperatures: Iterable[float] = TEMPERATURES,
        similarity: Similarity | str = COSINE,
        **options: Unpack[RankingOptions],
    ) -> None:
        super().__init__(model, similarity, temp_agg(temperatures), **options)


class TempAggMRLLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several prefixes, and over several temperatures at
    each.

        L = sum_i sum_t InfoNCE(x[:d_i], tau_t)

    A prefix is cut first and then divided by its norm as the similarity says. With a single
    temperature and cosine it is sentence-transformers' ``MatryoshkaLoss`` around
    MultipleNegativesRankingLoss.

    Args:
        model: The SentenceTransformer to train.
        dims: Prefixes d_i; None: a quarter, a half and all of the model's dimensions, as in the
            paper.
        temperatures: Temperatures tau_t, by default as in the paper.
        similarity: A Similarity or its name.
        **options: All other arguments of MagnitudeRankingLoss except ``terms``.

    Raises:
        ValueError: If dims are not distinct whole numbers from 1 up.

    Source: Dinu et al., ICLR 2025, Eq. 7; Kusupati et al., Matryoshka Representation Learning,
        NeurIPS 2022.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        dims: Iterable[int] | None = None,
        temperatures: Iterable[float] = TEMPERATURES,
        similarity: Similarity | str = COSINE,
        **options: Unpack[RankingOptions],
    ) -> None:
        dims = quarters(model) if dims is None else dims
        super().__init__(model, similarity, temp_agg_mrl(dims, temperatures), **options)


class TempSpecMRLLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several prefixes, each at its own temperature.

        L = sum_i InfoNCE(x[:d_i], tau_i)

    The low temperature goes to the small prefix. The high one acts on the coordinates of all
    prefixes.

    Args:
        model: The SentenceTransformer to train.
        temperatures: Mapping of prefixes d_i to temperatures tau_i, or the temperatures of ``dims``
            in their order.
        similarity: A Similarity or its name.
        dims: Prefixes d_i; None: those of the mapping, or a quarter, a half and all dimensions.
        **options: All other arguments of MagnitudeRankingLoss except ``terms``.

    Raises:
        ValueError: If there is not one temperature for each prefix.

    Source: Dinu et al., ICLR 2025, Eq. 8.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        temperatures: Mapping[int, float] | Iterable[float] = TEMPERATURES,
        similarity: Similarity | str = COSINE,
        *,
        dims: Iterable[int] | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        if isinstance(temperatures, Mapping):
            if dims is not None:
                raise InputError("temperatures names the prefixes already; leave out dims.")
        else:
            prefixes = prefix_dims(quarters(model) if dims is None else dims)
            given = tuple(temperatures)
            if len(given) != len(prefixes):
                raise InputError(
                    "TempSpecMRLLoss takes one temperature for each prefix; got the prefixes"
                    f" {list(prefixes)} and the temperatures {list(given)}."
                )
            temperatures = dict(zip(prefixes, given, strict=True))
        terms = tuple(Term(dim, temperatures[dim]) for dim in sorted(prefix_dims(temperatures)))
        super().__init__(model, similarity, terms, **options)


def quarters(model: SentenceTransformer) -> tuple[int, int, int]:
    """The paper's 256, 512 and 1024 of 1024 dimensions, for any model."""
    refuse_other_models(model, "The choice of prefixes")
    width = output_width(model)
    if width is None or width < 4:
        raise InputError(
            f"The embeddings of this model have {width} dimensions. Name the prefixes to train."
        )
    return width // 4, width // 2, width
