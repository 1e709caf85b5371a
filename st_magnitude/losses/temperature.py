"""Temperature losses: ranking losses with several temperatures, several prefixes, or a temperature for every prefix.

With InfoNCE(k, tau) for the ranking loss of the first k coordinates at the temperature tau:

    TempAgg      sum_t           w_t InfoNCE(D, tau_t)                 Eq. 6
    TempAggMRL   sum_i lambda_i sum_t w_t InfoNCE(d_i, tau_t)          Eq. 7
    TempSpecMRL  sum_i lambda_i     InfoNCE(d_i, tau_i)                Eq. 8

A high temperature lowers the intrinsic dimension, so less is lost when embeddings are truncated or binarised. A loss is
a list of terms for the kernel, which computes all of them for about the price of one. Any other loss takes the lists as
``terms=``.

Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in Contrastive Training,
ICLR 2025, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import prefix_dims
from st_magnitude.kernel.terms import Term
from st_magnitude.losses.ranking import LossOptions, MagnitudeRankingLoss
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import output_width, refuse_other_models

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "TempAggLoss",
    "TempAggMRLLoss",
    "TempSpecMRLLoss",
    "quarters",
    "temp_agg",
    "temp_agg_mrl",
    "temp_spec_mrl",
]

TEMPERATURES = (0.03, 0.06, 0.1)  # the paper's, section 5

CITATION = """
@inproceedings{dinu2025effective,
    title={Effective Post-Training Embedding Compression via Temperature Control in Contrastive Training},
    author={Georgiana Dinu and Corey Barrett and Yi Xiang and Miguel Romero Calvo and Anna Currey and Xing Niu},
    booktitle={The Thirteenth International Conference on Learning Representations},
    year={2025}
}
"""


def temp_agg(temperatures: Iterable[float] = TEMPERATURES, weights: Iterable[float] | None = None) -> tuple[Term, ...]:
    """The terms of Eq. 6: one term for each temperature, all at the full dimension. See :class:`TempAggLoss`.

    Example:
        >>> temp_agg([0.03, 0.1])
        (Term(dim=None, temperature=0.03, weight=1.0), Term(dim=None, temperature=0.1, weight=1.0))
    """
    temperatures = tuple(temperatures)
    if not temperatures:
        raise ValueError("temperatures is empty; give at least one, such as temperatures=(0.03, 0.06, 0.1).")
    weights = _weights(weights, len(temperatures), "temperatures")
    return tuple(Term(None, temperature, weight) for temperature, weight in zip(temperatures, weights, strict=True))


def temp_agg_mrl(
    dims: Iterable[int],
    temperatures: Iterable[float] = TEMPERATURES,
    dim_weights: Iterable[float] | None = None,
    temperature_weights: Iterable[float] | None = None,
) -> tuple[Term, ...]:
    """The terms of Eq. 7: every prefix at every temperature. See :class:`TempAggMRLLoss`.

    The full dimension should be among the prefixes. With one temperature it is plain MRL (Eq. 5).

    Example:
        >>> temp_agg_mrl([256, 128], [0.05])
        (Term(dim=128, temperature=0.05, weight=1.0), Term(dim=256, temperature=0.05, weight=1.0))
    """
    at_full = temp_agg(temperatures, temperature_weights)
    return tuple(Term(dim, t.temperature, lam * t.weight) for dim, lam in _prefixes(dims, dim_weights) for t in at_full)


def temp_spec_mrl(
    temperatures: Mapping[int, float], dim_weights: Mapping[int, float] | None = None
) -> tuple[Term, ...]:
    """The terms of Eq. 8, TempSpecMRL: every prefix at its own temperature.

    The low temperature goes to the small prefix, which a small index searches with: the paper has 0.03, 0.06 and 0.1 at
    a quarter, a half and all of the dimensions. The high one acts on the coordinates of all prefixes.

    Args:
        temperatures: Mapping of prefixes d_i to temperatures tau_i.
        dim_weights: Mapping of prefixes d_i to weights lambda_i; None: 1 for each.

    Raises:
        ValueError: As `temp_agg_mrl` does, or if the weights belong to other prefixes.

    Example:
        >>> temp_spec_mrl({128: 0.03, 256: 0.1})
        (Term(dim=128, temperature=0.03, weight=1.0), Term(dim=256, temperature=0.1, weight=1.0))
    """
    if dim_weights is not None and dim_weights.keys() != temperatures.keys():
        raise ValueError(
            f"dim_weights has the dims {sorted(dim_weights)}, but temperatures has {sorted(temperatures)}. "
            "Give one weight for each dim of temperatures."
        )
    weights = None if dim_weights is None else [dim_weights[dim] for dim in temperatures]
    return tuple(Term(dim, temperatures[dim], lam) for dim, lam in _prefixes(temperatures, weights))


class TempAggLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several temperatures.

        L = sum_t w_t InfoNCE(tau_t)

    Args:
        model: The SentenceTransformer to train.
        temperatures: Temperatures tau_t, by default as in the paper.
        similarity: A Similarity or its name. Under one that keeps magnitude the temperatures are relative: the factor
            that ``scale="auto"`` finds stretches all of them.
        weights: Weights w_t; None: 1 for each.
        **options: All other arguments of MagnitudeRankingLoss except ``terms``.

    Raises:
        ValueError: If there are no temperatures, one of them is not positive, or there are not as many weights.

    With learned exponents: ``LearnableNormLoss(model, terms=temp_agg())``.

    Source: Dinu et al., ICLR 2025, Eq. 6.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        temperatures: Iterable[float] = TEMPERATURES,
        similarity: Similarity | str = COSINE,
        *,
        weights: Iterable[float] | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(model, similarity, temp_agg(temperatures, weights), **options)


class TempAggMRLLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several prefixes, and over several temperatures at each.

        L = sum_i lambda_i sum_t w_t InfoNCE(x[:d_i], tau_t)

    With a single temperature and cosine it is sentence-transformers' ``MatryoshkaLoss`` around
    MultipleNegativesRankingLoss. MatryoshkaLoss does not work for any other similarity. Here a prefix is cut first and
    then divided by its norm as the similarity says, so the norm stays where the similarity keeps it.

    Args:
        model: The SentenceTransformer to train.
        dims: Prefixes d_i; None: a quarter, a half and all of the model's dimensions, as in the paper.
        temperatures: Temperatures tau_t, by default as in the paper.
        similarity: A Similarity or its name, as in TempAggLoss.
        dim_weights: Weights lambda_i, in the order of dims; None: 1 for each.
        temperature_weights: Weights w_t; None: 1 for each.
        **options: All other arguments of MagnitudeRankingLoss except ``terms``.

    Raises:
        ValueError: If dims are not distinct whole numbers from 1 up, or as TempAggLoss does.

    With learned exponents: ``LearnableNormLoss(model, terms=temp_agg_mrl([96, 192, 384]))``.

    Example:
        ::

            stm.prepare(model, "qnorm")
            loss = stm.TempAggMRLLoss(model, dims=[96, 192, 384], similarity="qnorm")

    Source: Dinu et al., ICLR 2025, Eq. 7; Kusupati et al., Matryoshka Representation Learning, NeurIPS 2022.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        dims: Iterable[int] | None = None,
        temperatures: Iterable[float] = TEMPERATURES,
        similarity: Similarity | str = COSINE,
        *,
        dim_weights: Iterable[float] | None = None,
        temperature_weights: Iterable[float] | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        dims = quarters(model) if dims is None else dims
        terms = temp_agg_mrl(dims, temperatures, dim_weights, temperature_weights)
        super().__init__(model, similarity, terms, **options)


class TempSpecMRLLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several prefixes, each at its own temperature: `temp_spec_mrl`.

        L = sum_i lambda_i InfoNCE(x[:d_i], tau_i)

    Args:
        model: The SentenceTransformer to train.
        temperatures: Mapping of prefixes d_i to temperatures tau_i; None: 0.03 at a quarter of the model's dimensions,
            0.06 at a half, and 0.1 at all of them.
        similarity: A Similarity or its name, as in TempAggLoss.
        dim_weights: Mapping of prefixes d_i to weights lambda_i; None: 1 for each.
        **options: All other arguments of MagnitudeRankingLoss except ``terms``.

    Source: Dinu et al., ICLR 2025, Eq. 8.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        temperatures: Mapping[int, float] | None = None,
        similarity: Similarity | str = COSINE,
        *,
        dim_weights: Mapping[int, float] | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        temperatures = temperatures or dict(zip(quarters(model), TEMPERATURES, strict=True))
        super().__init__(model, similarity, temp_spec_mrl(temperatures, dim_weights), **options)


def quarters(model: SentenceTransformer) -> tuple[int, int, int]:
    """The paper's 256, 512 and 1024 of 1024 dimensions, for any model."""
    refuse_other_models(model, "The choice of prefixes")
    width = output_width(model)
    if width is None or width < 4:
        raise ValueError(f"The embeddings of this model have {width} dimensions. Name the prefixes to train.")
    return width // 4, width // 2, width


def _prefixes(dims: Iterable[int], weights: Iterable[float] | None) -> list[tuple[int, float]]:
    """Pairs (dim, weight) in ascending order."""
    whole = prefix_dims(dims)
    return sorted(zip(whole, _weights(weights, len(whole), "dims"), strict=True))


def _weights(weights: Iterable[float] | None, number: int, of: str) -> Sequence[float]:
    weights = (1.0,) * number if weights is None else tuple(weights)
    if len(weights) != number:
        raise ValueError(f"There are {number} {of} but {len(weights)} weights. Give one weight for each.")
    return weights
