"""The figures of the demo: what one model does on one task, and how much of it the surface of a text explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from st_magnitude import geometry
from st_magnitude.commands.demo.docstrings import DocstringTask
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.admission import surface_features
from st_magnitude.similarity import COSINE, DOT, Similarity

__all__ = ["Controls", "Measurement", "measure", "measure_controls"]

Array = NDArray[np.float64]


@dataclass
class Measurement:
    """The figures of one model on one task; arrays are nDCG@10 of every query, (n,)."""

    matched: Array  # scored with the similarity of training
    cosine: Array
    dot: Array
    exponent: float  # of documents, chosen on other data
    chosen: Array  # at that exponent
    boilerplate_in_top_10: float  # share of the top 10 at that exponent
    cohens_d: float  # norms of answers against those of boilerplate
    cohens_d_without_length: float  # with the logarithm of the text length regressed out
    auc: float  # of the norm as a detector of answers
    relevant_kept: float  # share of the answers in the half of the index with the larger norms
    pruned: Array  # at the exponent in that half; answers in the other half count as missed
    clean: Array  # at the exponent in an index without boilerplate
    norms: Array  # of the documents, (m,)


def measure(encoded: EncodedTask, corpus: Mapping[str, str], matched: Similarity, exponent: float) -> Measurement:
    """Measures raw embeddings."""
    answers = encoded.degrees > 0  # (m,)
    norms = geometry.norms(encoded.documents)
    larger_half = np.zeros(len(norms), dtype=bool)
    larger_half[np.argsort(-norms, kind="stable")[: (len(norms) + 1) // 2]] = True
    words = [len(corpus[document].split()) for document in encoded.document_ids or corpus]
    calibrated = Similarity(1.0, exponent)
    top = encoded.top(calibrated)
    return Measurement(
        matched=encoded.ndcg(encoded.top(matched)),
        cosine=encoded.ndcg(encoded.top(COSINE)),
        dot=encoded.ndcg(encoded.top(DOT)),
        exponent=exponent,
        chosen=encoded.ndcg(top),
        boilerplate_in_top_10=float((~answers)[top.numpy()].mean()),
        cohens_d=geometry.cohens_d(norms[answers], norms[~answers]),
        cohens_d_without_length=geometry.adjusted_cohens_d(norms, np.log(words), answers),
        auc=geometry.auroc(norms[answers], norms[~answers]),
        relevant_kept=float(larger_half[answers].mean()),
        pruned=encoded.ndcg(encoded.top(calibrated, among=larger_half)),
        clean=encoded.ndcg(encoded.top(calibrated, among=answers)),
        norms=norms,
    )


@dataclass
class Controls:
    """A classifier that sees only the surface of a chunk: its length, punctuation and capitals."""

    auc: float  # as a detector of answers, on the test corpus
    correlation_with_norm: float  # Spearman, of its logit with the norm of the QNorm model
    prior: Array  # nDCG@10 of pretrained cosine + weight * log P(answer | surface), (n,)
    prior_weight: float  # chosen on dev


def measure_controls(task: DocstringTask, pretrained: Mapping[str, EncodedTask], qnorm_norms: Array) -> Controls:
    """Trains the classifier on the chunks of the training packages and chooses its weight beside cosine on dev."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    answers = set().union(*task.train.relevant.values())
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(surface_features(list(task.train.corpus.values())), [d in answers for d in task.train.corpus])
    features = {
        split: surface_features([corpus[document] for document in sorted(corpus)])
        for split, corpus in (("dev", task.dev.corpus), ("test", task.test.corpus))
    }

    def score(split: str, weight: float) -> Array:
        encoded = pretrained[split]
        log_prior = torch.from_numpy(classifier.predict_log_proba(features[split])[:, 1:])  # (m, 1)
        # cosine + weight * prior is the inner product of vectors with one more dimension
        queries = torch.nn.functional.pad(COSINE.query(encoded.queries), (0, 1), value=1.0)
        documents = torch.cat([COSINE.document(encoded.documents), weight * log_prior.to(encoded.documents)], dim=1)
        augmented = EncodedTask(queries, documents, encoded.columns)
        return augmented.ndcg(augmented.top(DOT))

    weight = max((0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6), key=lambda weight: score("dev", weight).mean())
    logits = classifier.decision_function(features["test"])
    is_answer = pretrained["test"].degrees > 0
    return Controls(
        auc=geometry.auroc(logits[is_answer], logits[~is_answer]),
        correlation_with_norm=geometry.spearman(logits, qnorm_norms),
        prior=score("test", weight),
        prior_weight=weight,
    )
