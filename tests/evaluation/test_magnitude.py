"""MagnitudeEvaluator against sentence-transformers' own evaluator and NumPy; its model card."""

import re

import numpy as np
import pytest
from _trainer import make_trainer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import BoW
from sentence_transformers.util import cos_sim, dot_score

import st_magnitude as stm
from st_magnitude import Similarity, geometry
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.modules import ExponentNorm

METRICS = ("ndcg@10", "mrr@10", "recall@100", "map@100")


@pytest.fixture
def raw_minilm(minilm) -> SentenceTransformer:
    """all-MiniLM without its Normalize: norms of about 5."""
    modules = [minilm[0], minilm[1]]
    return SentenceTransformer(modules=modules, similarity_fn_name="dot", device="cpu")


def reference(task: dict, model: SentenceTransformer) -> dict[str, float]:
    functions = {"cosine": cos_sim, "dot": dot_score}
    evaluator = InformationRetrievalEvaluator(
        **task, score_functions=functions, precision_recall_at_k=[100]
    )
    return evaluator(model)


@pytest.mark.parametrize("dim", [None, 24])
def test_equals_the_evaluator_of_sentence_transformers(task, raw_minilm, dim):
    raw_minilm.truncate_dim = dim
    metrics = MagnitudeEvaluator(**task)(raw_minilm)
    expected = reference(task, raw_minilm)
    for function in ("cosine", "dot"):
        for metric in METRICS:
            key = f"{function}_{metric}"
            assert metrics[key] == pytest.approx(expected[key], abs=1e-12)
    assert metrics["matched_ndcg@10"] == metrics["dot_ndcg@10"]
    assert dim is None or metrics["cosine_ndcg@10"] < 0.99  # the figures are not all 1


@pytest.mark.parametrize("learnable", [False, True])
def test_looks_behind_an_exponent_norm(task, static_model, learnable):
    """Matched is the score that the model's users get, everything else is of the raw embeddings."""
    raw = MagnitudeEvaluator(**task, similarity=Similarity(0.2, 0.6))(static_model)
    static_model.append(ExponentNorm(0.2, 0.6, learnable=learnable))
    assert MagnitudeEvaluator(**task)(static_model) == pytest.approx(raw, rel=1e-6)
    served = reference(task, static_model)
    for metric in METRICS:
        assert raw[f"matched_{metric}"] == pytest.approx(served[f"dot_{metric}"])
    assert raw["matched_map@100"] != raw["cosine_map@100"]


@pytest.mark.parametrize("similarity", ["dot", Similarity(1.0, 0.5)])
def test_figures_of_norms_and_directions(model, similarity):
    """ExponentNorm hides norms from scores, not from these figures."""
    sides = {
        role: np.float64(model.encode(list(texts.values())))
        for role, texts in (("query", QUERIES), ("document", CORPUS))
    }
    stm.prepare(model, similarity)
    found = MagnitudeEvaluator(QUERIES, CORPUS, RELEVANT_DOCS)(model)
    expected = {}
    for role, x in sides.items():
        lengths = geometry.norms(x)
        expected[f"{role}_norm_mean"] = lengths.mean()
        expected[f"{role}_norm_cv"] = geometry.coefficient_of_variation(lengths)
        expected[f"{role}_mean_cosine"] = geometry.mean_cosine(x)
        expected[f"{role}_isoscore"] = geometry.isoscore(x)
    chosen = np.isin(list(CORPUS), list(set().union(*RELEVANT_DOCS.values())))
    expected["cohens_d"] = geometry.cohens_d(lengths[chosen], lengths[~chosen])
    sizes = chosen.sum(), (~chosen).sum()
    expected["cohens_d_error"] = geometry.cohens_d_error(expected["cohens_d"], *sizes)
    for key, value in expected.items():
        assert found.pop(key) == pytest.approx(value, rel=1e-4), key
    assert len(found) == 3 * len(METRICS)


def test_norms_that_mark_the_wrong_documents_are_told(caplog):
    """At once, or later where d fell; four documents cannot show it."""
    texts = {"a": "bee bee bee", "b": "bee bee", "c": "wax", "d": "wax wax"}

    def warnings_of(evaluator, weights):
        caplog.clear()
        evaluator(SentenceTransformer(modules=[BoW(["bee", "wax"], weights)], device="cpu"))
        messages = [r.message for r in caplog.records if r.levelname == "WARNING"]
        return [message for message in messages if "Cohen" in message]

    def of(answers, copies=20):
        corpus = {f"{key}{i}": text for key, text in texts.items() for i in range(copies)}
        relevant = {key for key in corpus if key[0] in answers}
        one = min(relevant)  # the others answer queries of another split
        return MagnitudeEvaluator({"q": "bee"}, corpus, {"q": {one}}, also_relevant=relevant)

    equal, wax = {"bee": 1.0, "wax": 1.0}, {"bee": 1.0, "wax": 1.3}
    assert not warnings_of(of("cd", copies=1), equal)
    [warning] = warnings_of(of("cd"), equal)
    assert "also_relevant" not in warning
    corpus = of("cd").data.corpus
    answers = {key for key in corpus if key[0] in "cd"}
    [warning] = warnings_of(MagnitudeEvaluator({"q": "bee"}, corpus, {"q": answers}), equal)
    assert "pass them as also_relevant" in warning
    right = of("ab")
    assert not warnings_of(right, equal)
    assert not warnings_of(right, equal)
    assert len(warnings_of(right, wax)) == 1
    assert not warnings_of(of("ab"), wax)


def test_a_model_card_has_the_loss_its_citation_and_both_geometries(model, tmp_path):
    """In a Trainer of one's own."""
    stm.prepare(model, "qnorm")
    task = QUERIES, CORPUS, RELEVANT_DOCS
    first = MagnitudeEvaluator(*task, name="before")(model)["before_document_isoscore"]
    options = {"max_steps": 2, "learning_rate": 1e-2}
    make_trainer(model, stm.QNormRankingLoss(model), tmp_path / "run", **options).train()
    last = MagnitudeEvaluator(*task, name="after")(model)["after_document_isoscore"]
    model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "loss:QNormRankingLoss" in card
    assert "eprint={2602.09229}" in card
    assert re.search(r"\| Metric .*\| before .*\| after .*\|", card)
    assert re.search(rf"\| document_isoscore .*\| {first:.4f} .*\| {last:.4f} ", card)
    assert f"{first:.4f}" != f"{last:.4f}"


def test_warns_of_collapse(caplog):
    """Relevant documents are long and point elsewhere: dot finds them, cosine does not."""
    words = BoW(["a", "b", "c"])
    model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
    corpus = {"long": "a a a b b b b b c c c c c"} | {f"near{i}": "a" for i in range(20)}
    metrics = MagnitudeEvaluator({"q": "a"}, corpus, {"q": {"long"}})(model)
    assert (metrics["dot_ndcg@10"], metrics["cosine_ndcg@10"]) == (1.0, 0.0)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "1.0000 by dot but 0.0000 by cosine" in warning
