"""BM25 and fusion against figures by hand, words in every script, and documents without words."""

import math
from itertools import permutations

import pytest

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import bm25_run, grams, reciprocal_rank_fusion, words


def search(queries, corpus, **options):
    return bm25_run(RetrievalData(queries, corpus, {}), **options)


def test_bm25_equals_the_formula():
    """Of a word that is asked for twice; documents without a word of the query are not there."""
    corpus = {"d1": "Bees make honey.", "d2": "honey honey", "d3": "wax", "empty": "", "dots": "!"}
    found = search({"q": "honey Honey tea"}, corpus, top_k=1000)["q"]
    idf = math.log(1 + (5 - 2 + 0.5) / (2 + 0.5))

    def score(f, length):
        return 2 * idf * f / (f + 1.5 * (1 - 0.75 + 0.75 * length / (6 / 5)))

    assert found == pytest.approx({"d2": score(2, 2), "d1": score(1, 3)}, rel=1e-12)
    assert list(found) == ["d2", "d1"]


def test_bm25_top_k_and_ties():
    equal = {f"d{i}": "bees" for i in (3, 1, 2, 0)} | {"best": "bees bees"}
    for top_k in (3, 99):
        found = search({"q": "bees"}, equal, top_k=top_k)["q"]
        assert list(found) == ["best", "d0", "d1", "d2", "d3"][:top_k]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Wi-Fi 6, C++!", ["wi", "fi", "6", "c"]),
        ("cafe\u0301 \uff34\uff25\uff21", ["caf\u00e9", "tea"]),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092d\u093e\u0937\u093e"],
        ),  # vowel signs
        ("\u7eff\u8336", ["\u7eff\u8336"]),
        ("\u6211\u60f3\u559d tea", ["\u6211\u60f3", "\u60f3\u559d", "tea"]),
        ("\u8336", ["\u8336"]),
        ("\u0e09\u0e31\u0e19", ["\u0e09\u0e31", "\u0e31\u0e19"]),
        ("\ud55c\uad6d \ucc28", ["\ud55c\uad6d", "\ucc28"]),  # Hangul has spaces
        ("?! \ue000", []),
    ],
)
def test_words_of_every_script(text, found):
    assert words(text) == found


def test_grams_are_characters_of_the_canonical_text():
    assert grams("Red  TEA!") == [" red", "red ", "ed t", "d te", " tea", "tea "]
    assert grams("ab") == grams("A B"[::2]) == [" ab "]
    assert grams("") == []


WORDLESS = {
    "punctuation": ["?!", "...", "--", ""],
    "an unknown script": ["\ue000\ue001", "\ue002", "\ue003"],
    "no document": [],
}


@pytest.mark.parametrize("documents", WORDLESS.values(), ids=WORDLESS)
@pytest.mark.parametrize("tokenizer", [words, lambda text: []])
def test_documents_without_words_are_found_by_no_query(documents, tokenizer, recwarn, caplog):
    queries = {"what": "which of them?", "same": "A the ?! \ue000", "empty": ""}
    corpus = {f"d{i}": text for i, text in enumerate(documents)}
    assert search(queries, corpus, tokenizer=tokenizer) == {query: {} for query in queries}
    assert "no document for 3 of 3 queries" in caplog.text
    assert not [str(warned.message) for warned in recwarn if "divide" in str(warned.message)]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_sees_the_progress_of_large_corpora(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr("st_magnitude.evaluation.lexical.LARGE", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    bm25_run(RetrievalData({"q": "tea"}, {"d": "tea", "e": "rain"}, {}))
    assert ("BM25S Compute Scores" in capsys.readouterr().err) == is_terminal


@pytest.mark.parametrize(("without", "warns"), [(2, False), (3, True)])
def test_a_warning_where_more_than_a_fifth_of_the_queries_find_nothing(caplog, without, warns):
    queries = {f"q{i}": "tea" if i >= without else "wax" for i in range(10)}
    bm25_run(RetrievalData(queries, {"d": "tea"}, {}))
    assert (f"no document for {without} of 10 queries, such as 'q0'" in caplog.text) == warns


def test_fusion_counts_ranks_and_no_order_of_runs_matters():
    """Of equal scores the lower id comes first."""
    runs = [
        {"q": {"b": 1.0, "a": 1.0, "c": 0.0}},
        {"q": {"c": 3.0, "b": 2.0}, "r": {"d": -1.0}},
        {"q": {"a": 0.1}},
    ]
    ranks = {"a": [1, 1], "c": [3, 1], "b": [2, 2]}
    expected = {d: sum(1 / (10 + rank) for rank in found) for d, found in ranks.items()}
    fused = reciprocal_rank_fusion(runs, k=10)
    assert fused == {"q": pytest.approx(expected, rel=1e-12), "r": {"d": 1 / 11}}
    assert list(fused["q"]) == list(ranks)
    for order in permutations(runs):
        assert reciprocal_rank_fusion(order, k=10) == fused
        assert list(reciprocal_rank_fusion(order, k=10, top_k=1)["q"]) == ["a"]


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the score nan for 'd01'"):
        reciprocal_rank_fusion([{"q1": {"d01": math.nan}}])
