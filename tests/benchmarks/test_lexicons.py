"""WordNet as text to train and evaluate on: its format, leaks and splits; no network."""

import random
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest
from _scripts import load, words

lexicons = load("lexicons")
Entry = lexicons.Entry


def synset(number: int, file: int, kind: str, lemmas: Iterable[str], gloss: str) -> str:
    lemmas = list(lemmas)
    words = " ".join(f"{lemma} {i:x}" for i, lemma in enumerate(lemmas))
    return (
        f"{number:08d} {file:02d} {kind} {len(lemmas):02x} {words} 002 @ 00000001 n 0000 ~ 00000002 n 0000 | {gloss}  "
    )


def test_synsets() -> None:
    lines = [
        "  1 A notice that | is no synset.  ",
        "",
        synset(
            17, 5, "n", ["water_horse", "Kelpie", "kelpie", "water_horse"], "a spirit of lakes; shaped like a horse"
        ),
        synset(
            18, 0, "s", ["moony(a)", "dreamy(p)", "far(ip)", "odd(x)"], '(of people) lost in thought; "a moony boy"'
        ),
        synset(19, 38, "v", [f"v{i}" for i in range(17)], "go slowly and quietly"),  # 17 is 11 in hexadecimal
        synset(20, 5, "n", ["shelties"], "small ponies"),  # too short
        synset(21, 0, "a", ["still"], '(of the wind and the sea) "the air was still"'),  # nothing but parentheses
    ]
    assert list(lexicons.synsets(lines)) == [
        Entry(
            "00000017-n", ("water horse", "Kelpie", "kelpie"), "a spirit of lakes; shaped like a horse", "noun.animal"
        ),
        Entry("00000018-s", ("moony", "dreamy", "far", "odd(x)"), "(of people) lost in thought", "adj.all"),
        Entry("00000019-v", tuple(f"v{i}" for i in range(17)), "go slowly and quietly", "verb.motion"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "leaking"),
    [
        ("mole", "a Mole, digging", True),
        ("mole", "a molecule", False),
        ("brown bear", "the (brown) bear of the woods", True),
        ("brown bear", "a bear that is brown", False),
        ("bear", "a brown_bear", True),
        ("!", "no words", True),  # nothing to search for
    ],
)
def test_leaks(name: str, text: str, leaking: bool) -> None:
    assert lexicons.leaks(name, text) == leaking


def test_every_sense_in_the_corpus_is_relevant() -> None:
    described = {("bank",): "the side of a river", ("Bank", "shore"): "where money is kept", ("pond",): "still water"}
    senses = [Entry(f"d{i}", names, text, "") for i, (names, text) in enumerate(described.items())]
    data = lexicons.retrieval(senses, 3, 3)
    (query,) = [key for key, name in data.queries.items() if name.lower() == "bank"]
    assert data.relevant[query].keys() == {"d0", "d1"}
    assert sorted(map(str.lower, data.queries.values())) == ["bank", "pond", "shore"]
    for seed in range(10):  # over two documents, only a sense that is in the corpus
        small = lexicons.retrieval(senses, 1, 2, seed)
        for key, name in small.queries.items():
            expected = {entry.key for entry in senses if name.lower() in map(str.lower, entry.names)}
            assert small.relevant[key].keys() == expected & small.corpus.keys()


SIZES = {"num_test_queries": 30, "corpus_size": 80, "num_dev_queries": 10, "dev_corpus_size": 30, "cluster_size": 20}


def write_wordnet(folder: Path) -> Path:
    """1,600 synsets, with lemmas that have several senses, that leak, and definitions that occur twice."""
    rng = random.Random(0)
    vocabulary = words(rng, 1500).split()
    (folder / "usr/share/wordnet").mkdir(parents=True)
    number = 0
    for part, kind, files, count in (
        ("noun", "n", (5, 6), 800),
        ("verb", "v", (38,), 500),
        ("adj", "s", (0, 1, 44), 200),
        ("adv", "r", (2,), 100),
    ):
        lines = ["  1 a licence"]
        for _ in range(count):
            number += 1
            lemmas = rng.sample(vocabulary, rng.randint(1, 3))
            text = words(rng, 6) + f" {lemmas[0]}" * (rng.random() < 0.2)
            gloss = f'{text}; "{lemmas[-1]} {words(rng, 1)}"'
            if rng.random() < 0.03 and len(lines) > 1:
                gloss = lines[-1].partition(" | ")[2].upper()
            lines.append(synset(number, rng.choice(files), kind, lemmas, gloss))
        (folder / f"usr/share/wordnet/data.{part}").write_text("\n".join(lines) + "\n")
    return folder


def test_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name and no text of what was held out is in the training pairs."""
    monkeypatch.setattr(lexicons, "_MIN_CLUSTER", 20)
    folder = write_wordnet(tmp_path)
    train, dev, test, (texts, labels) = lexicons.wordnet(folder, **SIZES)
    assert list(train) == ["noun", "verb", "adjective", "adverb"]
    trained_names, trained_texts = set(), set()
    for pairs in train.values():
        assert pairs.column_names == ["anchor", "positive"]
        anchors, positives = pairs.to_dict().values()
        assert len(set(zip(anchors, positives, strict=True))) == len(pairs)
        assert not any(map(lexicons.leaks, anchors[:5000], positives[:5000]))
        trained_names |= set(map(lexicons._same, anchors))
        trained_texts |= set(map(lexicons._words, set(positives)))
    for data in (dev, test):
        held_out = set(map(lexicons._words, data.corpus.values()))
        assert len(held_out) == len(data.corpus)
        assert not held_out & trained_texts
        names = set(map(lexicons._same, data.queries.values()))
        assert len(names) == len(data.queries)
        assert not names & trained_names
        for query, relevant in data.relevant.items():
            assert relevant
            assert not any(lexicons.leaks(data.queries[query], data.corpus[document]) for document in relevant)
    assert not dev.corpus.keys() & test.corpus.keys()
    assert not set(map(lexicons._same, dev.queries.values())) & set(map(lexicons._same, test.queries.values()))
    assert len(texts) == len(labels) == len(set(texts))
    assert not set(map(lexicons._words, texts)) & trained_texts
    assert Counter(labels) == {"noun.animal": 20, "noun.artifact": 20, "verb.motion": 20}
    assert [len(test.queries), len(test.corpus)] == [30, 80]
    assert [len(dev.queries), len(dev.corpus)] == [10, 30]
    assert min(len(pairs) for pairs in train.values()) > 20
    paths = sorted((folder / "usr/share/wordnet").iterdir())
    entries = [entry for path in paths for entry in lexicons.synsets(path.read_text().splitlines())]
    files = {entry.text: entry.label for entry in lexicons.merge(entries)}
    assert [files[text] for text in texts] == labels
    assert len(list(groupby(labels))) > 20  # mixed
    assert lexicons.wordnet(folder, **SIZES).test == test
    assert lexicons.wordnet(folder, 1, **SIZES).test != test
