"""mine_negatives against mine_hard_negatives, and by hand where that would normalise."""

import random

import pytest
import torch
from _lookup import bag
from _tiny import ROWS
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.util import mine_hard_negatives

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.modules import ExponentNorm

BOILERPLATE = sorted({text for row in ROWS for text in row[2:]})


def rows(data: Dataset) -> list[dict]:
    return [dict(row) for row in data]


class Judge:
    """The part of a CrossEncoder that mine_hard_negatives uses."""

    def predict(self, pairs: list[tuple[str, str]], **_) -> torch.Tensor:
        return torch.tensor([float(len(document) % 7) for _query, document in pairs])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_format": "n-tuple", "range_min": 1, "num_negatives": 2, "max_score": 0.97},
        {"output_scores": True, "absolute_margin": 0.01, "sampling_strategy": "random"},
        {"output_format": "labeled-list", "relative_margin": 0.05, "num_negatives": 4},
        {"output_format": "labeled-pair", "absolute_margin": 2.0, "cross_encoder": Judge()},
    ],
)
def test_a_cosine_model_gets_what_sentence_transformers_mines(model, options):
    """Also with several positives of a query, and with fewer negatives than wanted."""
    queries, corpus = ({f"{i:02d}": row[side] for i, row in enumerate(ROWS)} for side in (0, 1))
    corpus |= {f"x{i:02d}": text for i, text in enumerate(BOILERPLATE)}
    relevant = {query: {query} for query in queries} | {"00": {"00", "07"}}
    data = RetrievalData(queries, corpus, relevant)
    rows_of_pairs = [(q, d) for q in data.query_ids for d in sorted(data.relevant[q])]
    pairs = Dataset.from_list(
        [{"anchor": data.queries[q], "positive": data.corpus[d]} for q, d in rows_of_pairs]
    )
    corpus = list(data.corpus.values())
    random.seed(0)
    theirs = mine_hard_negatives(pairs, model, corpus=corpus, verbose=False, **options)
    random.seed(0)
    ours = stm.mine_negatives(model, data, **options)
    assert ours.column_names == theirs.column_names
    for one, other in zip(rows(ours), rows(theirs), strict=True):
        for name in ("score", "scores"):
            assert one.pop(name, 0) == pytest.approx(other.pop(name, 0), abs=1e-6)
        assert one == other


def words(*closing, similarity: str = "dot") -> SentenceTransformer:
    """A model whose embeddings count the words a, b, c and d: scores can be read off."""
    return bag("abcd", *closing, similarity=similarity)


@pytest.mark.parametrize(
    ("closing", "name", "similarity", "best"),
    [
        ((), "dot", None, "a a a d d d d d"),
        ((), "dot", "qnorm", "a a a d d d d d"),
        ((), "dot", "cosine", "a z"),
        ((), "cosine", None, "a z"),
        ((Normalize(),), "dot", None, "a z"),
        ((ExponentNorm(1.0, 0.5),), "dot", None, "a a c"),
    ],
)
def test_the_scores_of_the_model_decide(closing, name, similarity, best):
    """Products 1, 2, 3 with norms 1, sqrt(5), sqrt(34); divided by norm^.5, 1, 1.34, 1.24."""
    # z is not a word of the model
    corpus = {"p": "a", "1": "a z", "2": "a a c", "3": "a a a d d d d d"}
    norms = {"a z": 1, "a a c": 5**0.5, "a a a d d d d d": 34**0.5}
    model = words(*closing, similarity=name)
    data = RetrievalData({"q": "a"}, corpus, {"q": {"p"}})
    options = {"similarity": similarity, "num_negatives": 1, "output_scores": True}
    options["verbose"] = False  # of one score there is no deviation
    mined = stm.mine_negatives(model, data, **options)
    gamma = {"a z": 1.0, "a a c": 0.5}.get(best, 0.0)
    assert mined["negative"] == [best]
    assert mined["scores"][0] == pytest.approx(
        [1.0, best.split().count("a") / norms[best] ** gamma]
    )


def test_what_answers_the_query_is_never_a_negative():
    """Two documents with the text of a positive, two positives, and two queries with one text."""
    queries = {"q1": "a b", "q2": "a b", "q3": "c"}
    corpus = {"d1": "a a", "copy of d1": "a a", "d2": "b b", "d3": "a b b", "d4": "c", "d5": "a c"}
    relevant = {"q1": {"d1", "d2"}, "q2": {"d3"}, "q3": {"d4"}}
    data = RetrievalData(queries, corpus, relevant)
    mined = stm.mine_negatives(words(), data, num_negatives=6, output_format="labeled-pair")
    found = {(row["anchor"], row["positive"], row["label"]) for row in mined}
    assert found == {
        *(("a b", text, 1) for text in ("a a", "b b", "a b b")),
        *(("a b", text, 0) for text in ("c", "a c")),
        ("c", "c", 1),
        *(("c", text, 0) for text in ("a a", "b b", "a b b", "a c")),
    }


@pytest.mark.parametrize("candidates", [None, {"q1", "q2", "q3", "x"}])
def test_the_query_itself_is_never_a_negative(candidates):
    """It is the hardest document of its query, and one of the others."""
    queries = {"q1": "a b", "q2": "a c", "q3": "a d"}
    corpus = {"d": "b c d", "q1": "a b", "q2": "some a c", "q3": "a", "x": "b"}
    data = RetrievalData(queries, corpus, {query: {"d"} for query in queries})
    mined = stm.mine_negatives(words(), data, candidates=candidates, num_negatives=4)
    own = {"q1": "a b", "q2": "some a c"}
    for query, text in queries.items():
        found = {row["negative"] for row in mined if row["anchor"] == text}
        assert found == {"a b", "some a c", "a", "b"} - {own.get(query)}


def test_only_candidates_are_negatives():
    """Not a positive of another query, which scores higher, and no document that is not named."""
    corpus = {"d1": "a", "d2": "b a a", "n1": "a b", "n2": "a a a"}
    data = RetrievalData({"q1": "a", "q2": "b"}, corpus, {"q1": {"d1"}, "q2": {"d2"}})
    mined = stm.mine_negatives(words(), data, candidates={"n1"}, num_negatives=2)
    assert rows(mined) == [
        {"anchor": "a", "positive": "a", "negative": "a b"},
        {"anchor": "b", "positive": "b a a", "negative": "a b"},
    ]
    with pytest.raises(ValueError, match="No document can be a negative"):
        stm.mine_negatives(words(), data, candidates={"d9"})


def test_every_text_is_encoded_once(static_model, task, monkeypatch):
    data, encoded = RetrievalData(*task.values()), []
    encode = SentenceTransformer.encode

    def counted(self, inputs, **options):
        encoded.extend(inputs)
        return encode(self, inputs, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", counted)
    stm.mine_negatives(static_model, data)
    assert sorted(encoded) == sorted([*data.queries.values(), *data.corpus.values()])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampling_strategy": "best"}, "sampling_strategy must be one of"),
        ({"num_negatives": 0}, "num_negatives must be at least 1"),
        ({"similarity": "qnrom"}, "No similarity is called 'qnrom'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_encoded(
    static_model, task, options, says, monkeypatch
):
    monkeypatch.setattr(SentenceTransformer, "encode", None)
    with pytest.raises(ValueError, match=says):
        stm.mine_negatives(static_model, RetrievalData(*task.values()), **options)


@pytest.mark.parametrize(
    ("output_format", "number", "left"),
    [("n-tuple", 2, 5), ("labeled-list", 1, 3), ("triplet", 1, 3), ("labeled-pair", 1, 0)],
)
def test_pairs_without_enough_negatives_are_counted(capsys, caplog, output_format, number, left):
    """q1 has no negative, q2 one and q3 two; and what upstream prints is printed."""
    corpus = {"d1": "a", "d2": "b b", "d3": "c c c"}
    relevant = {"q1": {"d1", "d2", "d3"}, "q2": {"d1", "d2"}, "q3": {"d3"}}
    data = RetrievalData({"q1": "a b", "q2": "b c", "q3": "c a"}, corpus, relevant)
    options = {"num_negatives": number, "output_format": output_format}
    stm.mine_negatives(words(), data, **options)
    assert "Metric" in capsys.readouterr().out
    assert (f"{left} of 6 pairs have too few" in caplog.text) == bool(left)
    stm.mine_negatives(words(), data, verbose=False, **options)
    assert "Metric" not in capsys.readouterr().out
