"""What the demo measures, against loops; and the whole job, shortened."""

import json
import logging
import re

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.commands.demo.measure import measure
from st_magnitude.commands.demo.report import comparison, table
from st_magnitude.commands.demo.run import _Clock, _encode, run
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask

RELEVANT = [sorted({i, i + 8}) for i in range(12)]  # the first 20 of 60 documents answer a query
CORPUS = {f"d{j:02}": "word " * (3 + 7 * j % 27) for j in range(60)}


@pytest.fixture
def encoded():
    """12 queries and 60 documents, of which the first 20 answer a query and have larger norms."""
    rng = np.random.default_rng(0)
    documents = torch.from_numpy(rng.normal(size=(60, 16)))
    documents[:20] *= 1.5
    vectors = torch.from_numpy(rng.normal(size=(12, 16)))
    documents[:12] += vectors
    return EncodedTask(vectors.float(), documents.float(), RELEVANT, document_ids=list(CORPUS))


def ranked(encoded, gamma, index=range(60)):
    """Ids by q · d / |d|^gamma, best first, in plain numpy."""
    q, d = encoded.queries.double().numpy(), encoded.documents.double().numpy()
    scores = q @ (d / np.linalg.norm(d, axis=1, keepdims=True) ** gamma).T
    return [[j for j in np.argsort(-row, kind="stable") if j in set(index)] for row in scores]


def loop_ndcg(ranking, relevant):
    gain = sum(1 / np.log2(i + 2) for i, j in enumerate(ranking[:10]) if j in relevant)
    return gain / sum(1 / np.log2(i + 2) for i in range(min(10, len(relevant))))


def test_measurement_equals_loops(encoded):
    m = measure(encoded, CORPUS, stm.QNORM, exponent=0.5)
    answers = range(20)
    for values, gamma in ((m.cosine, 1), (m.dot, 0), (m.matched, 0), (m.chosen, 0.5)):
        expected = [loop_ndcg(r, docs) for r, docs in zip(ranked(encoded, gamma), RELEVANT, strict=True)]
        np.testing.assert_allclose(values, expected)
    top = [j for r in ranked(encoded, 0.5) for j in r[:10]]
    assert m.boilerplate_in_top_10 == pytest.approx(np.mean([j not in answers for j in top]))

    norms = encoded.documents.double().norm(dim=1).numpy()
    half = sorted(range(60), key=lambda j: -norms[j])[:30]
    assert m.relevant_kept == pytest.approx(np.mean([j in half for j in answers]))
    for values, index in ((m.pruned, half), (m.clean, answers)):  # answers outside of the index count as missed
        expected = [loop_ndcg(r, docs) for r, docs in zip(ranked(encoded, 0.5, index), RELEVANT, strict=True)]
        np.testing.assert_allclose(values, expected)
    pairs = [(norms[a] > norms[b]) for a in answers for b in range(60) if b not in answers]
    assert m.auc == pytest.approx(np.mean(pairs))
    assert 0 < m.relevant_kept < 1  # none of the above is trivial here
    assert len({m.cosine.mean(), m.dot.mean(), m.chosen.mean(), m.pruned.mean(), m.clean.mean()}) == 5


def test_encoding_leaves_the_model_as_it_is(minilm):
    data = RetrievalData({"q": "what barks?"}, {"d": "a dog", "e": "a cat"}, {"q": {"d"}})
    before = [type(module) for module in minilm]
    norms = _encode(minilm, data).documents.norm(dim=1)
    assert (norms > 2).all()  # raw
    assert [type(module) for module in minilm] == before
    assert np.linalg.norm(minilm.encode("a dog")) == pytest.approx(1.0, abs=1e-5)


def test_the_clock_estimates_the_time_left(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = _Clock(lines.append, training=1.0)
    clock.stage("read", "Reading")
    now[0] = 2 * clock.expected["read"]  # twice as long as expected
    clock.stage("pretrained", "Encoding")
    clock.stage("mteb", "Scoring")
    total = sum(clock.expected.values()) / 60
    assert f"about {total:.0f} min left] Reading" in lines[0]
    assert total < 5
    assert f"[  60 s, about {2 * (total - 0.5):.0f} min left] Encoding" in lines[1]
    assert "about a minute left] Scoring" in lines[2]


def test_a_tie_is_called_one():
    rng = np.random.default_rng(0)
    a = rng.uniform(size=200)
    assert "a tie" in comparison("x", a, a + rng.normal(scale=0.1, size=200))
    assert "better" in comparison("x", a + 0.2, a)
    assert "worse" in comparison("x", a, a + 0.2)


def test_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(FileExistsError, match="--output"):
        run(tmp_path)


@pytest.mark.slow
def test_the_whole_job_shortened(tmp_path, caplog):
    from st_magnitude.commands.demo.docstrings import build_docstring_task

    caplog.set_level(logging.ERROR)
    small = build_docstring_task(train_queries=80, dev_queries=25, test_queries=40, max_files=60, progress=False)
    lines = []
    results = run(tmp_path / "demo", steps=3, batch_size=8, task=small, say=lines.append)

    text = "\n".join(lines)
    assert "they agree" in text
    assert "answers kept" in text
    assert len(re.findall(r"\[ *\d+ s, about .* left\]", text)) == 6
    assert json.loads((tmp_path / "demo" / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "demo" / "norms.png").read_bytes().startswith(b"\x89PNG")
    data = RetrievalData.from_beir(tmp_path / "demo" / "data", "test")
    for name in ("cosine", "qnorm"):
        model = SentenceTransformer(str(tmp_path / "demo" / name))  # plain: stock modules
        scores = InformationRetrievalEvaluator(data.queries, data.corpus, data.relevant)(model)
        own = scores[f"{model.similarity_fn_name}_ndcg@10"]
        assert own == pytest.approx(results["models"][name]["matched"], abs=2e-3)
    assert results["mteb_ndcg_at_10"] == pytest.approx(results["models"]["qnorm"]["matched"], abs=1e-3)


def test_table_has_a_column_a_model(encoded):
    m = measure(encoded, CORPUS, stm.DOT, 0.0)
    header, *rows = table({"before": m, "after": m}).splitlines()
    assert header.split() == ["before", "after"]
    assert all(len(row) == len(header) for row in rows)
