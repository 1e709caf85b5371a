"""admit against plain loops, the honesty of its figures, shards, and errors before anything is encoded."""

import json
import re

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.commands.app import app
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.admission import SCORERS, surface_features

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = [a + b for a in "bdfgklmnprstvz" for b in ("ar", "el", "in", "os", "um")]


@pytest.fixture(scope="module")
def model():
    """Counts words, so that long texts have large norms."""
    made = SentenceTransformer(modules=[BoW(WORDS)], device="cpu")
    made.similarity_fn_name = "dot"
    return made


def words(rng, number):
    return " ".join(rng.choice(WORDS, number))


@pytest.fixture(scope="module")
def data():
    """120 queries with one or two answers each; 200 answers are sentences, 200 others are short and end in a colon."""
    rng = np.random.default_rng(0)
    corpus = {f"a{i:03d}": words(rng, int(rng.integers(5, 14))) + "." for i in range(200)}
    corpus |= {f"x{i:03d}": words(rng, int(rng.integers(2, 9))) + " :" for i in range(200)}
    corpus = {key: corpus[key] for key in rng.permutation(sorted(corpus)).tolist()}
    relevant = {f"q{i:03d}": {f"a{i:03d}"} | ({f"a{i + 1:03d}"} if i % 3 == 0 else set()) for i in range(120)}
    queries = {q: " ".join(corpus[min(d)].strip(".").split()[:3]) for q, d in relevant.items()}
    return RetrievalData(queries, corpus, relevant)


def test_norm_against_a_loop(model, data):
    found = stm.admit(model, data, keep=0.5, scorer="norm")
    vectors = model.encode([data.corpus[key] for key in sorted(data.corpus)]).astype(np.float64)
    sizes = np.linalg.norm(vectors, axis=1)
    threshold = sorted(sizes)[len(sizes) // 2]
    kept = {key for key, size in zip(sorted(data.corpus), sizes, strict=True) if size >= threshold}
    assert found.kept_ids == sorted(kept)
    assert found.share >= 0.5
    shares = [len(kept & answers.keys()) / len(answers) for answers in data.relevant.values()]
    assert found.answers_kept[0] == pytest.approx(np.mean(shares), abs=1e-12)
    assert found.answers_kept[1] < np.mean(shares) < found.answers_kept[2]

    encoded = data.encode(model)
    among = np.array([key in kept for key in data.document_ids])
    expected = [encoded.ndcg(encoded.top(stm.DOT, among=some)).mean() for some in (None, among)]
    assert found.ndcg == pytest.approx(expected, abs=1e-12)


def test_the_surface_keeps_the_sentences(model, data):
    found = stm.admit(model, data, keep=0.5)
    assert found.scorer == "surface"
    assert found.answers_kept[0] == 1.0 > stm.admit(model, data, keep=0.5, scorer="norm").answers_kept[0]
    assert 0.95 < found.answers_kept[1] < 1.0  # no loss in 120 queries is not certainty
    assert {key[0] for key in found.kept_ids} == {"a"}
    assert all(len(line) <= 80 for line in str(found).splitlines())


def test_figures_are_of_queries_that_did_not_choose(model):
    """Relevance is a coin flip here: nothing can keep more than its share, whatever a regression learns by heart."""
    stated = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        marks = [*"abC1.,:;()[]`'\"=_/- "]
        corpus = {f"d{i:03d}": "".join(rng.choice(marks, 40)) + " bar" for i in range(120)}
        relevant = {f"q{i}": {f"d{i:03d}"} for i in range(60)}
        data = RetrievalData({q: words(rng, 2) for q in relevant}, corpus, relevant)
        found = stm.admit(model, data, keep=0.5)
        known = [i for i, key in enumerate(found.ids) if key in set().union(*relevant.values())]
        assert (found.scores >= found.threshold)[known].mean() > 0.6  # learned by heart
        stated.append(found.answers_kept[0])
    assert 0.35 < np.mean(stated) < 0.5  # below its share: the answers known by heart take the places


def test_recall_drops_as_much_as_it_can(model, data):
    found = stm.admit(model, data, recall=0.9, scorer="norm")
    sizes = dict(zip(found.ids, found.scores, strict=True))

    def kept(threshold):
        return np.mean([np.mean([sizes[key] >= threshold for key in answers]) for answers in data.relevant.values()])

    largest = max(size for size in sizes.values() if kept(size) >= 0.9)
    assert found.threshold == largest
    assert stm.admit(model, data, recall=0.9).share < found.share


def test_documents_that_come_later(model, data):
    for scorer in SCORERS:
        found = stm.admit(model, data, keep=0.5, scorer=scorer)
        texts = [data.corpus[key] for key in found.ids]
        later = found.score(texts, model.encode_document(texts)) >= found.threshold
        assert [key for key, is_kept in zip(found.ids, later, strict=True) if is_kept] == found.kept_ids


def test_cosine_model_has_no_norm(data):
    unit = SentenceTransformer(modules=[BoW(WORDS), Normalize()], device="cpu")
    found = stm.admit(unit, data, keep=0.5)
    assert found.scorer == "surface"
    with pytest.raises(ValueError, match="The model normalises, so all norms are 1"):
        stm.admit(unit, data, keep=0.5, scorer="norm")


def test_surface_features_see_only_the_surface():
    prose, parameters = surface_features(["Sorts the list in place.", "key : callable, default=None"])
    assert len(prose) == len(parameters)
    assert not np.allclose(prose, parameters)
    np.testing.assert_allclose(surface_features(["Abcd efg."]), surface_features(["Xyzw uvt."]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Give either keep= or recall="),
        ({"keep": 0.5, "recall": 0.9}, "Give either keep="),
        ({"keep": 1.0}, "strictly between 0 and 1; got keep=1.0"),
        ({"recall": 0.0}, "strictly between 0 and 1; got keep=None, recall=0.0"),
        ({"keep": 0.5, "scorer": "size"}, "scorer must be one of 'surface' and 'norm'"),
        ({"keep": 0.5, "similarity": "euclidean"}, "euclidean"),
    ],
)
def test_errors_come_before_encoding(model, data, options, message, monkeypatch):
    for name in ("encode", "encode_query", "encode_document"):
        monkeypatch.setattr(model, name, None)
    with pytest.raises(ValueError, match=re.escape(message)):
        stm.admit(model, data, **options)
    few = RetrievalData(data.queries, data.corpus, {"q000": {"a000"}})
    with pytest.raises(ValueError, match="1 queries have a relevant document, but at least 20"):
        stm.admit(model, few, keep=0.5)


def test_command(model, data, tmp_path):
    model.save_pretrained(str(tmp_path / "model"))
    data.save(tmp_path / "data", "dev")
    arguments = ["admit", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--keep", "0.5", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["scorer"], figures["kept"], figures["documents"]) == ("surface", 200, 400)
    assert len((tmp_path / "out" / "kept.txt").read_text().splitlines()) == 200
    assert json.loads((tmp_path / "out" / "admission.json").read_text()) == figures
