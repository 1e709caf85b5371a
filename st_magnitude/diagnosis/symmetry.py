"""Whether the queries and documents of a task swap roles, told from texts and judgments alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.diagnosis.findings import TaskSymmetry
from st_magnitude.geometry import auroc

__all__ = ["task_symmetry"]


def task_symmetry(
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    symmetric: bool | None = None,
) -> TaskSymmetry:
    """Decides whether queries and documents swap roles.

    Texts are compared by their lower-cased words:

    - shared = the larger of two shares: the queries that are also documents, and the relevant documents that are also
      queries;
    - mutual = the share of the judgments (a, b), in which b is also a query and a is also a document, for which (b, a)
      is judged too;
    - alike = whether the probability that a relevant document has more words than a query lies within 0.35 and 0.65.

    ======================  =====================================  ============
    shared                  and                                    verdict
    ======================  =====================================  ============
    at least half           mutual is at least half                symmetric
    at least half           mutual is at most a tenth              asymmetric
    at least half           mutual is undefined, lengths alike     symmetric
    less than a tenth       lengths not alike                      asymmetric
    ======================  =====================================  ============

    In all other cases the verdict is "unclear": paraphrases of texts that are never queries look like short answers.
    Pass ``symmetric`` then.

    Args:
        queries: Query id -> text.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        symmetric: The verdict, if you know it.

    Example:
        >>> texts = {"a": "bees make honey", "b": "honey is made by bees"}
        >>> task_symmetry(texts, texts, {"a": {"b"}, "b": {"a"}}).verdict
        'symmetric'
        >>> answers = {"d": "They collect nectar and thicken it in the hive."}
        >>> task_symmetry({"q": "who makes honey?"}, answers, {"q": {"d"}}).verdict
        'asymmetric'

    Source: the principle is that of arXiv 2602.09229, section 6.3; the definition is ours.
    """
    relevant = RetrievalData(queries, corpus, relevant_docs).relevant
    judged = {query: documents for query in queries if (documents := relevant.get(query))}
    asking = {query: _words(queries[query]) for query in judged}
    answering = {document: _words(corpus[document]) for document in sorted(set().union(*judged.values()))}
    ask, answer = set(asking.values()), {_words(text) for text in corpus.values()}

    in_corpus = float(np.mean([text in answer for text in asking.values()]))
    that_ask = float(np.mean([text in ask for text in answering.values()]))
    pairs = {(asking[q], answering[d]) for q, documents in judged.items() for d in documents}
    both_ways = [(b, a) in pairs for a, b in pairs if a != b and b in ask and a in answer]
    mutual = float(np.mean(both_ways)) if both_ways else math.nan
    longer = auroc([len(t) for t in answering.values()], [len(t) for t in asking.values()])
    own = float(np.mean([t in answer and (t, t) not in pairs for t in asking.values()]))

    shared, alike = max(in_corpus, that_ask), 0.35 <= longer <= 0.65
    if symmetric is not None:
        verdict, reason = "symmetric" if symmetric else "asymmetric", "as given by the argument symmetric"
    elif shared >= 0.5 and mutual >= 0.5:
        verdict, reason = "symmetric", "the same texts are queries and documents, and judgments hold both ways"
    elif shared >= 0.5 and mutual <= 0.1:
        verdict, reason = "asymmetric", "the same texts are queries and documents, but judgments hold one way only"
    elif shared >= 0.5 and math.isnan(mutual) and alike:
        verdict, reason = "symmetric", "the same texts are queries and documents, and both have similar lengths"
    elif shared < 0.1 and not alike:
        verdict, reason = "asymmetric", "queries and documents share no texts and differ in length"
    else:
        verdict, reason = "unclear", "texts and judgments do not decide it; pass symmetric=True or symmetric=False"
    return TaskSymmetry(verdict, reason, in_corpus, that_ask, mutual, longer, own)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.lower().split())
