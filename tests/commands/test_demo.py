"""What the demo measures, against loops; and the whole job, shortened."""

import json
import logging

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.commands.demo.run import Encoded, comparison, measure, ndcg_at_10, run, surface_features, table
from st_magnitude.corpus.beir import RetrievalData, load_beir


@pytest.fixture
def encoded():
    """12 queries, 60 documents of which the first 20 answer something and are longer as vectors."""
    rng = np.random.default_rng(0)
    queries = {f"q{i}": f"query {i}" for i in range(12)}
    corpus = {f"d{j}": "word " * int(rng.integers(3, 30)) for j in range(60)}
    relevant = {f"q{i}": {f"d{i}", f"d{i + 8}"} for i in range(12)}
    documents = torch.from_numpy(rng.normal(size=(60, 16)))
    documents[:20] *= 1.5
    vectors = torch.from_numpy(rng.normal(size=(12, 16)))
    for i in range(12):
        documents[i] += vectors[i]
    return Encoded(RetrievalData(queries, corpus, relevant), vectors.float(), documents.float())


def ranked(encoded, gamma, index=range(60)):
    """Ids by q · d / |d|^gamma, best first, in plain numpy."""
    q, d = encoded.queries.double().numpy(), encoded.documents.double().numpy()
    scores = q @ (d / np.linalg.norm(d, axis=1, keepdims=True) ** gamma).T
    return [[j for j in np.argsort(-row, kind="stable") if j in set(index)] for row in scores]


def loop_ndcg(ranking, relevant):
    gain = sum(1 / np.log2(i + 2) for i, j in enumerate(ranking[:10]) if f"d{j}" in relevant)
    return gain / sum(1 / np.log2(i + 2) for i in range(min(10, len(relevant))))


def test_measurement_equals_loops(encoded):
    m = measure(encoded, stm.QNORM, exponent=0.5)
    relevant = list(encoded.data.relevant_docs.values())
    answers = sorted({int(d[1:]) for docs in relevant for d in docs})
    for values, gamma in ((m.cosine, 1), (m.dot, 0), (m.matched, 0), (m.chosen, 0.5)):
        expected = [loop_ndcg(r, docs) for r, docs in zip(ranked(encoded, gamma), relevant, strict=True)]
        np.testing.assert_allclose(values, expected)
    top = [j for r in ranked(encoded, 0.5) for j in r[:10]]
    assert m.boilerplate_in_top_10 == pytest.approx(np.mean([j not in answers for j in top]))

    norms = encoded.documents.double().norm(dim=1).numpy()
    half = sorted(range(60), key=lambda j: -norms[j])[:30]
    assert m.relevant_kept == pytest.approx(np.mean([j in half for j in answers]))
    for values, index in ((m.pruned, half), (m.clean, answers)):
        expected = [loop_ndcg(r, docs) for r, docs in zip(ranked(encoded, 0.5, index), relevant, strict=True)]
        np.testing.assert_allclose(values, expected)
    pairs = [(norms[a] > norms[b]) for a in answers for b in range(60) if b not in answers]
    assert m.auc == pytest.approx(np.mean(pairs))
    assert 0 < m.relevant_kept < 1  # none of the above is trivial here
    assert len({m.cosine.mean(), m.dot.mean(), m.chosen.mean(), m.pruned.mean(), m.clean.mean()}) == 5


def test_pruned_answers_count_as_missed(encoded):
    nothing = np.zeros(60, dtype=bool)
    nothing[40] = True
    assert (ndcg_at_10(stm.DOT(encoded.queries, encoded.documents), encoded.relevant, nothing) == 0).all()


def test_a_tie_is_called_one():
    rng = np.random.default_rng(0)
    a = rng.uniform(size=200)
    assert "a tie" in comparison("x", a, a + rng.normal(scale=0.1, size=200))
    assert "better" in comparison("x", a + 0.2, a)
    assert "worse" in comparison("x", a, a + 0.2)


def test_surface_features_see_only_the_surface():
    prose, parameters = surface_features(["Sorts the list in place.", "key : callable, default=None"])
    assert len(prose) == len(parameters)
    assert not np.allclose(prose, parameters)
    np.testing.assert_allclose(surface_features(["Abcd efg."]), surface_features(["Xyzw uvt."]))


def test_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(FileExistsError, match="--output"):
        run(tmp_path)


@pytest.mark.slow
def test_the_whole_job_shortened(tmp_path, caplog):
    from st_magnitude.commands.demo import build_docstring_task

    caplog.set_level(logging.ERROR)
    small = build_docstring_task(train_queries=80, dev_queries=25, test_queries=40, max_files=60, progress=False)
    lines = []
    results = run(tmp_path / "demo", steps=3, batch_size=8, task=small, say=lines.append)

    text = "\n".join(lines)
    assert "they agree" in text
    assert "answers kept" in text
    assert json.loads((tmp_path / "demo" / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "demo" / "norms.png").read_bytes().startswith(b"\x89PNG")
    data = load_beir(tmp_path / "demo" / "data", "test")
    for name in ("cosine", "qnorm"):
        model = SentenceTransformer(str(tmp_path / "demo" / name))  # plain: stock modules
        scores = InformationRetrievalEvaluator(data.queries, data.corpus, data.relevant_docs)(model)
        own = scores[f"{model.similarity_fn_name}_ndcg@10"]
        assert own == pytest.approx(results["models"][name]["matched"], abs=2e-3)
    assert results["mteb_ndcg_at_10"] == pytest.approx(results["models"]["qnorm"]["matched"], abs=1e-3)


def test_table_has_a_column_a_model(encoded):
    m = measure(encoded, stm.DOT, 0.0)
    header, *rows = table({"before": m, "after": m}).splitlines()
    assert header.split() == ["before", "after"]
    assert all(len(row) == len(header) for row in rows)
