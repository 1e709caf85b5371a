"""WordNet as text to train and evaluate on: its format and leaks; no network."""

from collections.abc import Iterable

import pytest
from benchmarks.data import lexicons
from benchmarks.data.lexicons import Entry


def synset(number: int, file: int, kind: str, lemmas: Iterable[str], gloss: str) -> str:
    lemmas = list(lemmas)
    words = " ".join(f"{lemma} {i:x}" for i, lemma in enumerate(lemmas))
    pointers = "002 @ 00000001 n 0000 ~ 00000002 n 0000"
    return f"{number:08d} {file:02d} {kind} {len(lemmas):02x} {words} {pointers} | {gloss}  "


def test_synsets() -> None:
    many = [f"v{i}" for i in range(17)]  # 17 is 11 in hexadecimal
    horse = "a spirit of lakes; shaped like a horse"
    lines = ["  1 A notice that | is no synset.  ", ""]
    lines.append(synset(17, 5, "n", ["water_horse", "Kelpie", "kelpie", "water_horse"], horse))
    gloss = '(of people) lost in thought; "a moony boy"'
    lines.append(synset(18, 0, "s", ["moony(a)", "dreamy(p)", "far(ip)", "odd(x)"], gloss))
    lines.append(synset(19, 38, "v", many, "go slowly and quietly"))
    lines.append(synset(20, 5, "n", ["shelties"], "small ponies"))  # too short
    gloss = '(of the wind and the sea) "the air was still"'  # nothing but parentheses
    lines.append(synset(21, 0, "a", ["still"], gloss))
    moony = ("moony", "dreamy", "far", "odd(x)")
    assert list(lexicons.synsets(lines)) == [
        Entry("00000017-n", ("water horse", "Kelpie", "kelpie"), horse, "noun.animal"),
        Entry("00000018-s", moony, "(of people) lost in thought", "adj.all"),
        Entry("00000019-v", tuple(many), "go slowly and quietly", "verb.motion"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "leaking"),
    [
        ("mole", "a Mole, digging", True),
        ("brown bear", "the (brown) bear of the woods", True),
        ("brown bear", "a bear that is brown", False),
        ("!", "no words", True),  # nothing to search for
    ],
)
def test_leaks(name: str, text: str, leaking: bool) -> None:
    assert lexicons.leaks(name, text) == leaking


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
