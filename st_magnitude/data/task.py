"""EncodedTask: the embeddings of retrieval data, and the only exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.similarity import DOT, Similarity
from st_magnitude.surgery.normalize import scoring_of
from st_magnitude.surgery.raw import encode_raw

TILE = 2**24  # scores that are held at a time
TILE_WIDTH = 2**16  # documents whose scores are held at a time


class NotFiniteError(InputError):
    """Embeddings that answer nothing: with NaN or infinite entries, or the same for all texts."""


@dataclass(frozen=True, eq=False)
class EncodedTask:
    """The embeddings of retrieval data, and the similarity by which a search compares them.

    `encode` makes one.

    Attributes:
        data: The queries, documents and judgments.
        query_ids: The n queries that are asked.
        queries: Their embeddings, (n, D).
        documents: The embeddings of the corpus in the order of ``data.document_ids``, (m, D).
        similarity: The similarity by which the model is served.

    Example:
        >>> data = RetrievalData({"q": "?"}, {"d1": "a", "d2": "b"}, {"q": {"d1"}})
        >>> queries = torch.tensor([[1.0, 0.0]])
        >>> documents = torch.tensor([[1.0, 0.0], [3.0, 3.0]])
        >>> task = EncodedTask(data, ["q"], queries, documents, Similarity.named("dot"))
        >>> found = task.search()
        >>> found["q"], found.ndcg.round(3)
        ({'d2': 3.0, 'd1': 1.0}, array([0.631]))
    """

    data: RetrievalData
    query_ids: Sequence[str]
    queries: Tensor
    documents: Tensor
    similarity: Similarity

    def __post_init__(self) -> None:
        # the search sums in float64, which Apple's GPUs do not have
        for name in ("queries", "documents"):
            if getattr(self, name).device.type == "mps":
                object.__setattr__(self, name, getattr(self, name).cpu())
        check_finite(self.queries, "query", self.query_ids)
        check_finite(self.documents, "document", self.data.document_ids)

    def with_prior(self, log_p: Mapping[str, float], weight: float) -> EncodedTask:
        """The same task with weight · log p(d) added to all scores, as one more dimension.

        The queries are ``[q, 1]`` and the documents ``[d, weight · log p(d)]``, q and d divided by
        the similarity, so an index for inner products ranks alike (docs/losses.md).

        Args:
            log_p: Document id -> log p(d), such as `RetrievalData.log_prior` of training queries.

        Raises:
            ValueError: If a document has no log p, or one that is not finite.

        Example:
            >>> data = RetrievalData({"q": "?"}, {"d1": "a", "d2": "b"}, {"q": {"d1"}})
            >>> one = torch.ones(1, 1)
            >>> task = EncodedTask(data, ["q"], one, one.repeat(2, 1), Similarity.named("dot"))
            >>> task.with_prior({"d1": -2.0, "d2": -0.5}, weight=0.5).search()["q"]
            {'d2': 0.75, 'd1': 0.0}

        Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
        Recommendations, RecSys 2019; Bachrach et al., Speeding Up the Xbox Recommender System Using
        a Euclidean Transformation for Inner-Product Spaces, RecSys 2014.
        """
        documents = self.data.document_ids
        values = [log_p.get(document, math.nan) for document in documents]
        if wrong := [d for d, x in zip(documents, values, strict=True) if not math.isfinite(x)]:
            raise InputError(
                f"log_p has no finite number for {len(wrong)} of {len(documents)} documents, such"
                f" as {wrong[0]!r}: use RetrievalData.log_prior of judgments over this corpus."
            )
        q = self.similarity.query(self.queries.double())
        d = self.similarity.document(self.documents.double())
        bias = weight * torch.tensor(values, dtype=torch.float64).to(d)[:, None]
        return replace(
            self,
            queries=torch.cat([q, torch.ones_like(q[:, :1])], dim=1),
            documents=torch.cat([d, bias], dim=1),
            similarity=DOT,
        )

    def search(self, k: int = 100) -> Ranking:
        """The best k documents of every query, with their scores."""
        return self.searches([self.similarity], k)[0]

    def sweep(self, exponents: Iterable[float], k: int = 10) -> dict[float, Ranking]:
        """`search` with other document exponents and unit queries, by exponent."""
        values = [float(exponent) for exponent in exponents]
        found = self.searches([Similarity(1.0, value) for value in values], k)
        return dict(zip(values, found, strict=True))

    def searches(self, similarities: Sequence[Similarity], k: int = 100) -> list[Ranking]:
        """`search` by several similarities. One matrix product serves all of them."""
        own = torch.from_numpy(self.data.own_columns(self.query_ids))
        found = best_documents(self.queries, self.documents, similarities, k, own)
        ids = list(self.query_ids)
        return [Ranking.of_rows(self.data, ids, c.numpy(), s.numpy(), k) for c, s in found]


def best_documents(
    queries: Tensor,
    documents: Tensor,
    similarities: Sequence[Similarity],
    k: int,
    own: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Columns and scores of the best k documents by each similarity, best first: (n, D), (m, D) ->
    (n, min(k, m)) each, on the CPU.

    Equal scores rank by column, the lower first. Products are summed in float64 and rounded to
    float32, so equal documents have equal scores wherever in the matrix they stand. ``own`` is the
    column of the query itself or -1, (n,), which scores -inf.
    """
    similarities = [Similarity(*x.exponents) for x in similarities]  # plain numbers
    own = torch.full((len(queries),), -1) if own is None else own
    chunk = min(len(documents), TILE_WIDTH)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in similarities]
    rows = max(1, TILE // chunk)
    # Powers of two, which change no digit, bring all scores into the range of float32.
    q, d = _exponent(queries), _exponent(documents)
    powers = [2.0 ** (q + round(d * (1 - x.exponents[1]))) for x in similarities]
    for some, its_own in zip(queries.double().split(rows), own.split(rows), strict=True):
        nothing = some.new_empty(len(some), 0)
        best = [(nothing.long(), nothing.float())] * len(found)
        for start in range(0, len(documents), chunk):
            part = documents[start : start + chunk].double()
            products = some @ part.T  # (rows, chunk)
            for i, similarity in enumerate(similarities):
                # The query exponent changes no ranking, so only the documents are divided.
                divisor = similarity.document_divisor(part) * powers[i]  # (chunk, 1)
                scores = (products / divisor.T).float()
                hidden = ((its_own >= start) & (its_own < start + len(part))).nonzero()[:, 0]
                places = hidden.to(scores.device), (its_own[hidden] - start).to(scores.device)
                scores[places] = -torch.inf
                columns = rank(scores, k)
                scores = torch.cat([best[i][1], scores.gather(1, columns)], dim=1)
                columns = torch.cat([best[i][0], columns + start], dim=1)
                # earlier documents stand first, so ties still go to the lower column
                order = rank(scores, k)
                best[i] = columns.gather(1, order), scores.gather(1, order)
        for i, (columns, scores) in enumerate(best):
            # |q|^gamma_query, which changes no order
            of_query = Similarity(1.0, similarities[i].exponents[0]).document_divisor(some)
            divided = scores.cpu().double() * powers[i] / of_query.cpu()
            found[i].append((columns.cpu(), divided))
    joined = (zip(*tiles, strict=True) for tiles in found)
    return [(torch.cat(columns), torch.cat(scores)) for columns, scores in joined]


def _exponent(x: Tensor) -> int:
    """The exponent of 2 of the largest number."""
    low, high = x.aminmax() if len(x) else (0.0, 0.0)
    return math.frexp(max(-float(low), float(high)))[1]


def rank(scores: Tensor, k: int) -> Tensor:
    """Columns of the k best scores of each row, best first, and of equal ones the lower column:
    (n, m) -> (n, min(k, m))."""
    k = min(k, scores.shape[1])
    values, indices = scores.topk(k, dim=1)
    # topk leaves open which of several equal scores it takes, and in which order.
    last = values[:, -1:]
    tied = ((scores >= last).sum(dim=1) > k).nonzero()[:, 0]
    # rows with a document outside that equals the k-th best: keep the lowest columns of those
    if len(tied):
        rows = scores[tied]
        above = rows > last[tied]
        equal = rows == last[tied]
        equal &= equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)
        indices[tied] = (above | equal).nonzero()[:, 1].view(-1, k)
    indices = indices.sort(dim=1).values
    order = scores.gather(1, indices).sort(dim=1, descending=True, stable=True).indices
    return indices.gather(1, order)


def encode(
    model: SentenceTransformer,
    data: RetrievalData,
    similarity: Similarity | str | None = None,
    *,
    before_normalize: bool = False,
    only: Collection[str] | None = None,
    query_prompt: str | None = None,
    query_prompt_name: str | None = None,
    corpus_prompt: str | None = None,
    corpus_prompt_name: str | None = None,
    known: Tensor | None = None,
    **encode: Any,
) -> EncodedTask:
    """The embeddings of queries and corpus, with the similarity by which a search ranks.

    They are taken before a closing ExponentNorm, by ``encode_query`` and ``encode_document``.

    Args:
        similarity: A Similarity or its name; by default the model's.
        before_normalize: Takes the embeddings before a closing Normalize, too. The similarity of
            such a model is then cosine, which ranks alike.
        only: Ids of the n queries to encode; by default those with a relevant document.
        query_prompt: Prompt of every query, in place of the model's, or ``query_prompt_name`` in
            ``model.prompts``.
        corpus_prompt: Prompt of every document, or ``corpus_prompt_name``.
        known: Embeddings of the corpus by the same model, which are not computed again, (m, D).
        **encode: Options of ``encode``, such as ``batch_size`` and ``show_progress_bar``.

    Raises:
        ValueError: If the model scores by a distance, an embedding is not finite, or the texts of
            one side all have the same.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "wax"])], device="cpu")
        >>> data = RetrievalData({"q": "bees"}, {"d1": "wax", "d2": "bees"}, {"q": {"d2"}})
        >>> encode(model, data, "dot").search().mean
        1.0
    """
    similarity = scoring_of(model, similarity, before_normalize=before_normalize)
    asked = list(data.query_ids if only is None else only)
    prompts = {"prompt": query_prompt, "prompt_name": query_prompt_name}
    queries = [data.queries[query] for query in asked]
    q = encode_raw(model, queries, "query", not before_normalize, **prompts, **encode)
    documents = [data.corpus[document] for document in data.document_ids]
    prompts = {"prompt": corpus_prompt, "prompt_name": corpus_prompt_name}
    d = known
    if d is None:
        d = encode_raw(model, documents, "document", not before_normalize, **prompts, **encode)
    for role, given, found in (("query", queries, q), ("document", documents, d)):
        are_same = role == "document" and (found == found[:1]).all()
        if len(set(given)) > 1 and (are_same or not found.any()):
            raise NotFiniteError(
                f"The embeddings of {len(set(given)):,} different {role} texts are all"
                f" {'the same' if found.any() else 'zero'}: the weights or the tokenizer of the"
                " model are damaged, it knows no word of the texts, or its training has collapsed."
                " Take another model."
            )
    return EncodedTask(data, asked, q, d, similarity)


def check_finite(embeddings: Tensor, role: str, ids: Sequence[str] | None = None) -> None:
    """Refuses embeddings, (n, D), with NaN or infinite entries, and names the text of the first."""
    broken = (~embeddings.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if broken:
        first = f"row {broken[0]}" if ids is None else repr(ids[broken[0]])
        raise NotFiniteError(
            f"{len(broken)} of {len(embeddings)} {role} embeddings are not finite, such as that of"
            f" {first}: the model has diverged, or overflows in half precision; load it in float32."
        )
