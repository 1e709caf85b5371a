"""Rank by a model together with BM25 in your engine, by the weight in a model's `deploy.json`.

Copy what you need. `query` is a vector, divided as docs/serving.md says, `question` is its text.

- Qdrant (run in local mode, in the tests): FormulaQuery of 1.14, TextQuery of 1.20. A repeated word
  of a query counts once. RrfQuery counts ranks from 0: Cormack's k = 60 is 61.
- pgvector (run, in the tests): ts_rank ignores how rare a word is. Store `postings`.
- Elasticsearch (from its documentation, 9.1, and source): `normalizer` has to be "none", its
  default. The linear retriever needs an Enterprise licence; `bool.should` with boosts does not.
- OpenSearch (from its documentation and source, 3.8): bounds need 3.2.
- Vespa (from its documentation, August 2026): with `dotproduct`, `closeness` is s. Every candidate
  has both scores. Switch stems off.
- Weaviate (from its documentation, 1.24 and later): `alpha` weighs scaled scores, so its weight is
  another one. Use `add_scores`.
- LanceDB (BM25 run, 0.40.0): LinearCombinationReranker gets scaled scores, and ranked the worst
  first before 0.33. Use `add_scores`. k1 stays 1.2: choose `scale` anew.
"""

import json
import math
from collections import Counter
from pathlib import Path

from st_magnitude.evaluation.lexical import TOKENS


def read_weights(folder):
    """What to multiply the model's scores and BM25's by, and the record that they come from."""
    deployed = json.loads((Path(folder) / "deploy.json").read_text())
    if deployed["model"] != ".":  # that of the folder
        raise ValueError(f"{folder} deploys {deployed['name']}, with another model or none.")
    how = deployed["how"]
    return how["weight"] / how["unit"], (1 - how["weight"]) / how["scale"], how


def add_scores(by_model, by_bm25, of_model, of_bm25):
    """The best ten of two searches of any engine, {document id: score} each of their best 100."""
    scores = {
        document: of_model * by_model.get(document, 0) + of_bm25 * by_bm25.get(document, 0)
        for document in by_model.keys() | by_bm25.keys()
    }
    return sorted(scores, key=lambda document: (-scores[document], document))[:10]


def postings(corpus, tokens):
    """Rows (word, place of the document, its part of BM25), for an engine without such a BM25."""
    counts = [Counter(TOKENS[tokens](text)) for text in corpus]
    mean_length = sum(count.total() for count in counts) / len(corpus)
    documents_with = Counter(word for count in counts for word in count)
    for i, count in enumerate(counts):
        for word, times in count.items():
            n = documents_with[word]
            idf = math.log(1 + (len(corpus) - n + 0.5) / (n + 0.5))
            length = 0.25 + 0.75 * count.total() / mean_length
            yield word, i, idf * times / (times + 1.5 * length)


# PostgreSQL with pgvector: a table postings (word text, id bigint, part float8), an index on word
PGVECTOR = """
WITH model AS (
  SELECT id, -(embedding <#> %(query)s::vector) AS s
  FROM docs ORDER BY embedding <#> %(query)s::vector LIMIT 100
), bm25 AS (
  SELECT id, sum(part) AS s
  FROM postings JOIN unnest(%(words)s::text[]) AS word USING (word)
  GROUP BY id ORDER BY s DESC, id LIMIT 100
)
SELECT id, %(of_model)s * coalesce(model.s, 0) + %(of_bm25)s * coalesce(bm25.s, 0) AS score
FROM model FULL JOIN bm25 USING (id) ORDER BY score DESC, id LIMIT 10
"""


def qdrant_text(question):
    """Qdrant's own BM25, of a payload index `TextIndexParams(type="text", scoring=True)`."""
    from qdrant_client import models

    bm25 = models.Bm25Scoring(bm25=models.Bm25Params(k=1.5, b=0.75))
    return models.TextQuery(text=models.TextQueryInput(query=question, scoring=bm25))


def qdrant(client, query, asked, of_model, of_bm25, using="text"):
    """`asked` is `qdrant_text(question)`, with `of_bm25 / 2.5`, or a sparse vector of postings."""
    from qdrant_client import models

    parts = [
        models.MultExpression(mult=[of_model, "$score[0]"]),
        models.MultExpression(mult=[of_bm25, "$score[1]"]),
    ]
    return client.query_points(
        "docs",
        prefetch=[
            models.Prefetch(query=query.tolist(), limit=100),
            models.Prefetch(query=asked, using=using, limit=100),
        ],
        query=models.FormulaQuery(
            formula=models.SumExpression(sum=parts), defaults={"$score[0]": 0.0, "$score[1]": 0.0}
        ),
        limit=10,
    ).points


def elasticsearch(query, question, of_model, of_bm25):
    """The body of a search, for a field `embedding` with `max_inner_product`."""
    knn = {"field": "embedding", "query_vector": query.tolist(), "k": 100, "num_candidates": 200}
    script = {"source": "Math.max(_score - 1, 0)"}  # _score is 1 + q · d
    by_model = {"script_score": {"query": {"knn": knn}, "script": script}}
    by_bm25 = {"match": {"text": question}}
    retrievers = [
        {"weight": of_model, "retriever": {"standard": {"query": by_model}}},
        {"weight": of_bm25 / 2.5, "retriever": {"standard": {"query": by_bm25}}},
    ]
    return {"retriever": {"linear": {"retrievers": retrievers, "rank_window_size": 100}}}


def opensearch(how):
    """A search pipeline for a `hybrid` query of `knn` and `match`, in this order, with a
    `pagination_depth` of 100 and `innerproduct`; what scores above a bound counts 3."""
    bounds = {
        "lower_bounds": [{"mode": "clip", "min_score": bound} for bound in (1, 0)],
        "upper_bounds": [
            {"mode": "clip", "max_score": bound}
            for bound in (1 + 3 * how["unit"], 3 * how["scale"])
        ],
    }
    weights = {"weights": [how["weight"], 1 - how["weight"]]}
    processor = {
        "normalization": {"technique": "min_max", "parameters": bounds},
        "combination": {"technique": "arithmetic_mean", "parameters": weights},
    }
    return {"phase_results_processors": [{"normalization-processor": processor}]}


# Vespa: `where ({targetHits: 100}nearestNeighbor(embedding, query)) or userQuery()`, with
# `of_bm25 / 2.5` as the input of_bm25
VESPA = """
rank-profile fused {
    inputs {
        query(query) tensor<float>(x[384])
        query(of_model) double
        query(of_bm25) double
    }
    rank-properties {
        bm25(text).k1: 1.5
    }
    first-phase {
        expression: query(of_model) * closeness(field, embedding) + query(of_bm25) * bm25(text)
    }
}
"""
