"""Temperature losses: ranking losses with several temperatures, several prefixes, or a temperature for every prefix.

With InfoNCE(k, tau) for the ranking loss of the first k coordinates at the temperature tau:

    TempAgg      sum_t           w_t InfoNCE(D, tau_t)                 Eq. 6
    TempAggMRL   sum_i lambda_i sum_t w_t InfoNCE(d_i, tau_t)          Eq. 7
    TempSpecMRL  sum_i lambda_i     InfoNCE(d_i, tau_i)                Eq. 8

A low temperature is best for retrieval at full size; a high one lowers the intrinsic dimension, so that less is lost
when embeddings are truncated or binarised. The sum is meant to have both.

Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in Contrastive Training,
ICLR 2025, section 5. Every loss is a list of terms for the kernel, which computes all of them for about the price of
one; the lists are functions of their own, so that any other loss takes them as ``terms=``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from sentence_transformers import SentenceTransformer

from st_magnitude.infonce import Term
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.similarity import COSINE, Similarity

__all__ = [
    "TempAggLoss",
    "TempAggMRLLoss",
    "TempSpecMRLLoss",
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
    """The terms of Eq. 6: one for each temperature, all at the full dimension.

    Args:
        temperatures: tau_t > 0.
        weights: w_t, one for each temperature; default: 1.

    Raises:
        ValueError: If there are no temperatures, one is not positive, or the weights are of another number.

    Example:
        >>> temp_agg([0.03, 0.1])
        (Term(dim=None, temperature=0.03, weight=1.0), Term(dim=None, temperature=0.1, weight=1.0))
    """
    temperatures = tuple(temperatures)
    if not temperatures:
        raise ValueError("temperatures is empty: give at least one, e.g. temperatures=(0.03, 0.06, 0.1).")
    taus_and_weights = zip(temperatures, _weights(weights, len(temperatures), "temperatures"), strict=True)
    return tuple(Term(None, temperature, weight) for temperature, weight in taus_and_weights)


def temp_agg_mrl(
    dims: Iterable[int],
    temperatures: Iterable[float] = TEMPERATURES,
    dim_weights: Iterable[float] | None = None,
    temperature_weights: Iterable[float] | None = None,
) -> tuple[Term, ...]:
    """The terms of Eq. 7: every prefix at every temperature. With one temperature it is plain MRL (Eq. 5).

    Args:
        dims: d_i, the prefixes to train, the full dimension among them.
        temperatures: tau_t > 0.
        dim_weights: lambda_i, one for each dim in the order given; default: 1.
        temperature_weights: w_t, likewise.

    Raises:
        ValueError: If dims are empty, not distinct whole numbers from 1 up, or as `temp_agg` does.

    Example:
        >>> temp_agg_mrl([256, 128], [0.05])
        (Term(dim=128, temperature=0.05, weight=1.0), Term(dim=256, temperature=0.05, weight=1.0))
    """
    at_full = temp_agg(temperatures, temperature_weights)
    return tuple(Term(dim, t.temperature, lam * t.weight) for dim, lam in _prefixes(dims, dim_weights) for t in at_full)


def temp_spec_mrl(
    temperatures: Mapping[int, float], dim_weights: Mapping[int, float] | None = None
) -> tuple[Term, ...]:
    """The terms of Eq. 8: every prefix at its own temperature, the smallest prefix at the lowest one.

    Args:
        temperatures: Prefix d_i -> temperature tau_i > 0.
        dim_weights: Prefix d_i -> lambda_i; default: 1.

    Raises:
        ValueError: If there are no prefixes, one is not a whole number from 1 up, a temperature is not positive, or
            the weights belong to other prefixes.

    Example:
        >>> temp_spec_mrl({128: 0.03, 256: 0.1})
        (Term(dim=128, temperature=0.03, weight=1.0), Term(dim=256, temperature=0.1, weight=1.0))
    """
    if not isinstance(temperatures, Mapping):
        raise ValueError(f"temperatures maps dims to temperatures, e.g. {{128: 0.03, 256: 0.1}}; got {temperatures!r}.")
    if dim_weights is not None and dim_weights.keys() != temperatures.keys():
        raise ValueError(
            f"dim_weights has the dims {sorted(dim_weights)}, temperatures has {sorted(temperatures)}: "
            "give a weight for each."
        )
    weights = None if dim_weights is None else [dim_weights[dim] for dim in temperatures]
    return tuple(Term(dim, temperatures[dim], lam) for dim, lam in _prefixes(temperatures, weights))


class TempAggLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several temperatures.

        L = sum_t w_t InfoNCE(tau_t)

    Args:
        model: The SentenceTransformer to train.
        temperatures: tau_t; the paper's by default.
        similarity: A Similarity or its name. Under one that keeps magnitude the temperatures are relative: all of them
            are stretched by the factor that ``scale="auto"`` finds.
        weights: w_t; default: 1.
        **options: All others of MagnitudeRankingLoss: ``scale``, ``regularizers``, ``mini_batch_size``,
            ``gather_across_devices``, ``n_terms_per_step``, ...

    Raises:
        ValueError: As `temp_agg` and MagnitudeRankingLoss do.

    With learned exponents: ``LearnableNormLoss(model, terms=temp_agg())``.

    Example:
        ::

            loss = stm.TempAggLoss(model)
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

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
        **options: Any,
    ) -> None:
        super().__init__(model, similarity, temp_agg(temperatures, weights), **options)


class TempAggMRLLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several prefixes, and over several temperatures at each.

        L = sum_i lambda_i sum_t w_t InfoNCE(x[:d_i], tau_t)

    With a single temperature and cosine it is sentence-transformers' ``MatryoshkaLoss`` around
    MultipleNegativesRankingLoss. Under any other similarity it is what MatryoshkaLoss cannot do: a prefix is cut
    first and divided by its norm as the similarity says, so that length is kept where the similarity keeps it.

    Args:
        model: The SentenceTransformer to train.
        dims: d_i; by default a quarter, a half and all of the model's dimensions, as in the paper.
        temperatures: tau_t; the paper's by default.
        similarity: As in TempAggLoss.
        dim_weights: lambda_i, in the order of dims; default: 1.
        temperature_weights: w_t; default: 1.
        **options: All others of MagnitudeRankingLoss.

    Raises:
        ValueError: As `temp_agg_mrl` and MagnitudeRankingLoss do; if the model has fewer dimensions than a prefix.

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
        **options: Any,
    ) -> None:
        dims = _quarters(model) if dims is None else dims
        terms = temp_agg_mrl(dims, temperatures, dim_weights, temperature_weights)
        super().__init__(model, similarity, terms, **options)


class TempSpecMRLLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` summed over several prefixes, each at its own temperature.

        L = sum_i lambda_i InfoNCE(x[:d_i], tau_i)

    The low temperature goes to the small prefix, which is what a small index searches with; the high one, at the full
    dimension, acts on the coordinates of all prefixes.

    Args:
        model: The SentenceTransformer to train.
        temperatures: d_i -> tau_i; by default 0.03 at a quarter of the model's dimensions, 0.06 at a half, 0.1 at all.
        similarity: As in TempAggLoss.
        dim_weights: d_i -> lambda_i; default: 1.
        **options: All others of MagnitudeRankingLoss.

    Raises:
        ValueError: As `temp_spec_mrl` and MagnitudeRankingLoss do; if the model has fewer dimensions than a prefix.

    With learned exponents: ``LearnableNormLoss(model, terms=temp_spec_mrl({96: 0.03, 384: 0.1}))``.

    Example:
        ::

            loss = stm.TempSpecMRLLoss(model, {96: 0.03, 192: 0.06, 384: 0.1})

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
        **options: Any,
    ) -> None:
        if temperatures is None:
            temperatures = dict(zip(_quarters(model), TEMPERATURES, strict=True))
        super().__init__(model, similarity, temp_spec_mrl(temperatures, dim_weights), **options)


def _quarters(model: SentenceTransformer) -> tuple[int, int, int]:
    """The paper's 256, 512 and 1024 of 1024 dimensions, for any model."""
    width = model.get_embedding_dimension()
    if width is None or width < 4:
        raise ValueError(f"The model says that its embeddings have {width} dimensions: name the prefixes to train.")
    return width // 4, width // 2, width


def _prefixes(dims: Iterable[int], weights: Iterable[float] | None) -> list[tuple[int, float]]:
    """(dim, weight) in ascending order."""
    dims = tuple(dims)
    try:
        whole = [index(dim) for dim in dims]
    except TypeError:
        raise ValueError(f"dims are whole numbers, e.g. [128, 256]; got {list(dims)}.") from None
    if not whole or min(whole) < 1 or len(set(whole)) < len(whole):
        raise ValueError(f"dims are distinct whole numbers from 1 up, at least one of them; got {whole}.")
    return sorted(zip(whole, _weights(weights, len(whole), "dims"), strict=True))


def _weights(weights: Iterable[float] | None, number: int, of: str) -> Sequence[float]:
    weights = (1.0,) * number if weights is None else tuple(weights)
    if len(weights) != number:
        raise ValueError(f"There are {number} {of} but {len(weights)} weights: give one weight for each.")
    return weights
