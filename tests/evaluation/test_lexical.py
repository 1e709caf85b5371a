"""BM25 and fusion against literal loops, words in every script, and documents without words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


ids = st.sampled_from("abcdefgh")
scores = st.integers(-3, 3).map(float)  # many ties
runs = st.dictionaries(st.sampled_from(["q1", "q2"]), st.dictionaries(ids, scores))


def fusion_loop(rankings, k):
    """Cormack et al., section 3: for each document, each run in which some others are ahead."""
    fused = {}
    for run in rankings:
        for query, scored in run.items():
            found = fused.setdefault(query, {})
            for d, own in scored.items():
                ahead = sum(other > own or (other == own and e < d) for e, other in scored.items())
                found[d] = found.get(d, 0.0) + 1 / (k + ahead + 1)
    return fused


@given(st.lists(runs, min_size=1, max_size=4), st.floats(0, 100), st.integers(1, 9), st.data())
def test_fusion_equals_the_loop_and_no_order_matters(rankings, k, top_k, data):
    fused = reciprocal_rank_fusion(rankings, k=k)
    expected = fusion_loop(rankings, k)
    assert fused.keys() == {query for run in rankings for query in run}
    for query, found in fused.items():
        assert found == pytest.approx(expected.get(query, {}), rel=1e-12)
        keys = [(-score, document) for document, score in found.items()]
        assert keys == sorted(keys)
    again = reciprocal_rank_fusion(data.draw(st.permutations(rankings)), k=k, top_k=top_k)
    for query, found in fused.items():
        assert list(again[query].items()) == list(found.items())[:top_k]


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the score nan for 'd01'"):
        reciprocal_rank_fusion([{"q1": {"d01": math.nan}}])
