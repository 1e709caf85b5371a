"""WordNet as text to train and evaluate on: no query leaks into its text."""

from benchmarks.data import lexicons
from benchmarks.data.lexicons import Entry


def test_a_name_without_words_leaks() -> None:
    """As there is nothing to search for."""
    assert lexicons.leaks("!", "no words")


def test_every_sense_in_the_corpus_is_relevant() -> None:
    described = {
        ("bank",): "the side of a river",
        ("Bank", "shore"): "where money is kept",
        ("pond",): "still water",
    }
    senses = [Entry(f"d{i}", names, text, "") for i, (names, text) in enumerate(described.items())]
    data = lexicons.retrieval(senses, 3, 3)
    (query,) = [key for key, name in data.queries.items() if name.lower() == "bank"]
    assert data.relevant[query].keys() == {"d0", "d1"}
    assert sorted(map(str.lower, data.queries.values())) == ["bank", "pond", "shore"]
