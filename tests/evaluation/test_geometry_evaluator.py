"""GeometryEvaluator against NumPy, and its table in a model card."""

import re

import numpy as np
import pytest
from _trainer import make_trainer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.evaluation import GeometryEvaluator, MagnitudeEvaluator

TEXTS = list(CORPUS.values())
IS_RELEVANT = [key in set().union(*RELEVANT_DOCS.values()) for key in CORPUS]


@pytest.mark.parametrize("similarity", ["cosine", "dot", stm.Similarity(1.0, 0.5)])
def test_figures_are_those_of_raw_embeddings(model, similarity):
    documents, queries = (
        np.float64(model.encode(list(texts))) for texts in (TEXTS, QUERIES.values())
    )
    # Normalize and ExponentNorm hide norms from scores, not from this evaluator
    stm.prepare(model, similarity)
    found = GeometryEvaluator(TEXTS, list(QUERIES.values()), IS_RELEVANT)(model)
    lengths, chosen = np.linalg.norm(documents, axis=1), np.array(IS_RELEVANT)
    unit = documents / lengths[:, None]
    cosines = (unit @ unit.T)[~np.eye(len(unit), dtype=bool)]
    asked = np.linalg.norm(queries, axis=1)
    spread = [lengths[x].var(ddof=1) * (x.sum() - 1) for x in (chosen, ~chosen)]
    expected = {
        "document_norm_mean": lengths.mean(),
        "document_norm_cv": lengths.std() / lengths.mean(),
        "query_norm_mean": asked.mean(),
        "query_norm_cv": asked.std() / asked.mean(),
        "cohens_d": (
            (lengths[chosen].mean() - lengths[~chosen].mean())
            / np.sqrt(sum(spread) / (len(lengths) - 2))
        ),
        "document_mean_cosine": cosines.mean(),
        "document_isoscore": stm.geometry.isoscore(documents),
    }
    d, (n, m) = expected["cohens_d"], (chosen.sum(), (~chosen).sum())
    expected["cohens_d_error"] = np.sqrt(1 / n + 1 / m + d**2 / (2 * (n + m)))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key
    assert len(list(model.children())) == 2 + (similarity != "dot")


@pytest.mark.parametrize("evaluator", [GeometryEvaluator, MagnitudeEvaluator])
def test_norms_that_mark_the_wrong_documents_are_told(evaluator, caplog):
    """At once, or later where d fell; four documents cannot show it."""
    texts = {"a": "bee bee bee", "b": "bee bee", "c": "wax", "d": "wax wax"}

    def warnings_of(evaluator, weights):
        caplog.clear()
        model = SentenceTransformer(modules=[BoW(["bee", "wax"], weights)], device="cpu")
        evaluator(model)
        messages = [r.message for r in caplog.records if r.levelname == "WARNING"]
        return [message for message in messages if "Cohen" in message]

    def of(answers, copies=20):
        corpus = {f"{key}{i}": text for key, text in texts.items() for i in range(copies)}
        is_relevant = [key[0] in answers for key in corpus]
        if evaluator is GeometryEvaluator:
            return evaluator(list(corpus.values()), is_relevant=is_relevant)
        relevant = {key for key in corpus if key[0] in answers}
        one = min(relevant)  # the others answer queries of another split
        return evaluator({"q": "bee"}, corpus, {"q": {one}}, also_relevant=relevant - {one})

    equal, wax = {"bee": 1.0, "wax": 1.0}, {"bee": 1.0, "wax": 1.3}
    assert not warnings_of(of("cd", copies=1), equal)
    assert len(warnings_of(of("cd"), equal)) == 1
    right = of("ab")
    assert not warnings_of(right, equal)
    assert not warnings_of(right, equal)
    assert len(warnings_of(right, wax)) == 1
    assert not warnings_of(of("ab"), wax)


def test_a_model_card_has_the_loss_its_citation_and_both_geometries(model, tmp_path):
    """In a Trainer of one's own."""
    stm.prepare(model, "qnorm")
    before, after = (GeometryEvaluator(TEXTS, name=name) for name in ("before", "after"))
    before(model)
    options = {"max_steps": 2, "learning_rate": 1e-2}
    make_trainer(model, stm.QNormRankingLoss(model), tmp_path / "run", **options).train()
    after(model)
    model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "loss:QNormRankingLoss" in card
    assert "eprint={2602.09229}" in card
    first, last = (f"{x.metrics['document_norm_mean']:.4f}" for x in (before, after))
    assert re.search(r"\| Metric .*\| before .*\| after .*\|", card)
    assert re.search(rf"\| document_norm_mean .*\| {first} .*\| {last} ", card)
    assert first != last
