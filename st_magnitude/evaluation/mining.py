"""Hard negatives by the scores of any similarity."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import dot_score, mine_hard_negatives, pairwise_dot_score
from torch import Tensor

from st_magnitude._checks import InputError, one_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import TILE, check_finite, hide_own
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import encode_raw
from st_magnitude.surgery.scoring import scoring_of

logger = logging.getLogger(__name__)


def mine_negatives(
    model: SentenceTransformer,
    data: RetrievalData,
    *,
    similarity: Similarity | str | None = None,
    candidates: Collection[str] | None = None,
    **options: Any,
) -> Dataset:
    """Mines hard negatives for training: documents that score high and do not answer the query.

    This is sentence-transformers' ``mine_hard_negatives`` with the scores of any similarity; by
    cosine the results are equal. Neither a document with the text of one of the query's positives
    nor the query itself is ever a negative.

    Args:
        model: The model whose scores count. If it ends in Normalize, its embeddings are unit ones.
        data: Queries, corpus and judgments.
        similarity: A Similarity or its name; by default the model's.
        candidates: Ids of the documents that can be negatives; by default all. Documents that are
            relevant to no query teach a norm, which in-batch negatives do not.
        **options: Arguments of ``mine_hard_negatives``, such as ``num_negatives``,
            ``output_format``, ``range_min``, ``relative_margin``, ``batch_size`` and ``verbose``,
            which prints its figures. Pairs that get no row are counted in the log. Its
            ``sampling_strategy="random"`` draws from Python's ``random``.

    Raises:
        ValueError: If no query has a relevant document, an option is out of its range, an embedding
            is not finite, or there is no candidate.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = BoW(["bees", "wax", "see"])
        >>> model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
        >>> corpus = {"d1": "bees", "d2": "wax", "d3": "see bees bees, see wax wax"}
        >>> data = RetrievalData({"q": "bees", "r": "wax"}, corpus, {"q": {"d1"}, "r": {"d2"}})
        >>> mine_negatives(model, data, num_negatives=1, verbose=False)[0]
        {'anchor': 'bees', 'positive': 'bees', 'negative': 'see bees bees, see wax wax'}
    """
    one_of("sampling_strategy", options.get("sampling_strategy", "top"), ("top", "random"))
    rows = [(query, key) for query in data.query_ids for key in sorted(data.relevant[query])]
    anchors = [data.queries[query] for query, _ in rows]
    positives = [data.corpus[key] for _, key in rows]
    wanted = data.corpus.keys() if candidates is None else set(candidates)
    texts = list(dict.fromkeys(text for key, text in data.corpus.items() if key in wanted))
    if not texts:
        raise InputError(
            "No document can be a negative: each is relevant to a query, or candidates names other "
            "documents than the corpus."
        )
    position = {text: i for i, text in enumerate(dict.fromkeys([*texts, *positives]))}
    own = {data.queries[query]: position.get(data.corpus[query], -1) for query in data.own}
    scorer = _Scorer(model, scoring_of(model, similarity), own, len(texts))
    options["faiss_batch_size"] = max(1, TILE // len(data.corpus))
    pairs = Dataset.from_dict({"anchor": anchors, "positive": positives})
    stand_in = cast(SentenceTransformer, scorer)
    mined = mine_hard_negatives(pairs, stand_in, corpus=texts, **options)
    number = len({*zip(anchors, positives, strict=True)})
    kept = len({*zip(mined["anchor"], map(str, mined["positive"]), strict=True)})
    if kept < number:
        logger.warning(
            f"{number - kept:,} of {number:,} pairs have too few negatives for a row and are left"
            " out: lower num_negatives, loosen range_min, margins and scores, or take another"
            " output_format."
        )
    return mined


@dataclass(frozen=True)
class _Scorer:
    """A model as ``mine_hard_negatives`` sees it: its embeddings and their inner products.

    The embedding of a query ends in the column of the document that is the query itself, or -1.
    """

    model: SentenceTransformer
    scoring: Similarity
    own: Mapping[str, int]  # text of a query -> that column
    num_candidates: int  # of the documents, the first

    @property
    def device(self) -> torch.device:
        return self.model.device

    def encode_query(self, texts: list[str], **options: Any) -> Tensor:
        embeddings = self.scoring.query(self._raw("query", texts, options))
        own = torch.tensor([self.own.get(text, -1) for text in texts]).to(embeddings)
        return torch.cat([embeddings, own[:, None]], dim=1)

    def encode_document(self, texts: list[str], **options: Any) -> Tensor:
        return self.scoring.document(self._raw("document", texts, options))

    def _raw(self, role: str, texts: list[str], options: Mapping[str, Any]) -> Tensor:
        """Embeddings after a closing Normalize, but before an ExponentNorm: (n, D)."""
        given = {name: options[name] for name in ("batch_size", "prompt", "prompt_name")}
        embeddings = encode_raw(self.model, texts, role, keep_normalize=True, **given)
        check_finite(embeddings, role, texts)
        if not 1e-15 < (longest := float(embeddings.norm(dim=1).max())) < 1e15:
            raise InputError(
                f"The longest {role} embedding has the norm {longest:.3g}, whose scores may leave"
                " float32. Multiply the embeddings by a constant: norms from 1e-15 to 1e15 fit."
            )
        return embeddings

    def similarity(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Scores of all documents: (n, D + 1), (m, D) -> (n, m)."""
        scores = dot_score(queries[:, :-1], documents)
        hide_own(scores, queries[:, -1].long().cpu())
        # mine_hard_negatives puts the positives behind the candidates
        scores[:, self.num_candidates :] = -torch.inf
        return scores

    def similarity_pairwise(self, queries: Tensor, documents: Tensor) -> Tensor:
        return pairwise_dot_score(queries[:, :-1], documents)
