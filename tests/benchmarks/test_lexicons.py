"""Two dictionaries as text to train and evaluate on: their formats, leaks, splits and the cache; no network."""

import doctest
import gzip
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from types import ModuleType

import pytest

from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lexicons.py"


def load() -> ModuleType:
    """benchmarks/ is no package: the script by its path."""
    spec = importlib.util.spec_from_file_location("lexicons", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lexicons"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


lexicons = load()
Entry = lexicons.Entry


def test_examples_in_docstrings() -> None:
    failed, attempted = doctest.testmod(lexicons)
    assert failed == 0
    assert attempted >= 5


# ---------------------------------------------------------------------------------------------------------------------
# WordNet's format
# ---------------------------------------------------------------------------------------------------------------------


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


def test_lexicographer_files() -> None:
    names = lexicons._LEXICOGRAPHER_FILES
    assert len(names) == len(set(names)) == 45
    numbered = {0: "adj.all", 2: "adv.all", 3: "noun.Tops", 18: "noun.person", 28: "noun.time", 29: "verb.body"}
    for number, name in {**numbered, 43: "verb.weather", 44: "adj.ppl"}.items():
        assert names[number] == name


@pytest.mark.parametrize(
    "line",
    [
        "no synset at all",
        "00000001 05 n 01 cat 0 000",  # no gloss
        "00000001 05 n 00 000 | a gloss of no lemma",
        "00000001 05 n 0z cat 0 000 | a gloss of no number",
        "00000001 45 n 01 cat 0 000 | a gloss of no file",
        "00000001 05 n 09 cat 0 000 | a gloss of too few lemmas",
    ],
)
def test_malformed_synsets(line: str) -> None:
    with pytest.raises(DataError, match=r"some/data:2 is no synset .*Expected WordNet 3\.0's data\.noun"):
        list(lexicons.synsets(["  1 licence", line], "some/data"))


@pytest.mark.parametrize(
    ("gloss", "text"),
    [
        ("without examples; in two parts", "without examples; in two parts"),
        ('having them; "the first"; "the second"', "having them"),
        ('no space:"the first"', "no space"),
        ('a comma, "the first"', "a comma"),
        ('an introduction; e.g., "the first"', "an introduction"),
        ('an idiom; as in the expression "on it"', "an idiom"),
        ('in brackets (e.g., "so")', "in brackets"),
        ("quoting `this' and `that'", "quoting 'this' and 'that'"),
        ('closed (or not), then open (as in "it")', "closed (or not), then open"),
    ],
)
def test_definition(gloss: str, text: str) -> None:
    assert lexicons.definition(gloss) == text


# ---------------------------------------------------------------------------------------------------------------------
# Names, leaks, relevance
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "leaking"),
    [
        ("mole", "a Mole, digging", True),
        ("mole", "a molecule", False),
        ("mole", "moles dig", False),
        ("brown bear", "the (brown) bear of the woods", True),
        ("brown-bear", "the brown bear", True),
        ("brown bear", "a bear that is brown", False),
        ("bear", "a brown_bear", True),
        ("!", "no words", True),  # nothing to search for
        ("", "", True),
    ],
)
def test_leaks(name: str, text: str, leaking: bool) -> None:
    assert lexicons.leaks(name, text) == leaking


def entries(*described: tuple[str, str]) -> list:
    return [Entry(f"d{i}", tuple(names.split(",")), text, "") for i, (names, text) in enumerate(described)]


def test_every_sense_in_the_corpus_is_relevant() -> None:
    senses = entries(("bank", "the side of a river"), ("Bank,shore", "where money is kept"), ("pond", "still water"))
    data = lexicons.retrieval(senses, 3, 3)
    (query,) = [key for key, name in data.queries.items() if name.lower() == "bank"]
    assert data.relevant[query] == {"d0", "d1"}
    assert sorted(map(str.lower, data.queries.values())) == ["bank", "pond", "shore"]
    for seed in range(10):  # over two documents, only a sense that is in the corpus
        small = lexicons.retrieval(senses, 1, 2, seed)
        for key, name in small.queries.items():
            expected = {entry.key for entry in senses if name.lower() in map(str.lower, entry.names)}
            assert small.relevant[key] == expected & small.corpus.keys()


def test_hyphens_and_case_are_one_name() -> None:
    data = lexicons.retrieval(entries(("sea-lion", "it barks at ships"), ("Sea lion", "a brave sailor")), 1, 2)
    assert list(data.relevant.values()) == [{"d0", "d1"}]


def test_a_name_that_leaks_anywhere_is_no_query() -> None:
    senses = entries(
        ("bank", "the side of a river"), ("bank,lender", "a bank for money"), ("7,+x", "has no two letters")
    )
    assert list(lexicons.retrieval(senses, 1, 3).queries.values()) == ["lender"]
    for seed in range(10):  # whatever ranks before it, a query's own text is in the corpus
        assert lexicons.retrieval(senses, 1, 1, seed).relevant == {"q-d1": {"d1"}}
    with pytest.raises(DataError, match="2 queries were asked for, but of 3 entries only 1 have a name of their own"):
        lexicons.retrieval(senses, 2, 3)


def test_excluded_and_everything() -> None:
    senses = entries(("bank", "the side of a river"), ("pond", "still water"))
    assert list(lexicons.retrieval(senses, 1, 2, excluded={"bank"}).queries.values()) == ["pond"]
    elsewhere = lexicons._by_name([*senses, Entry("x", ("pond",), "a pond somewhere else", "")])
    assert list(lexicons.retrieval(senses, 1, 2, everything=elsewhere).queries.values()) == ["bank"]


@pytest.mark.parametrize(("queries", "documents"), [(0, 1), (2, 1), (1, 4), (-1, -1)])
def test_impossible_sizes(queries: int, documents: int) -> None:
    with pytest.raises(DataError, match=f"{queries} queries over {documents} documents were asked for, of 3 things: "):
        lexicons.retrieval(entries(("aa", "b"), ("cc", "d"), ("ee", "f")), queries, documents, what="things")


def test_merge() -> None:
    same = entries(("bank,edge", "The side of it"), ("pond", "water"), ("edge,shore", "the side -- of it."))
    assert lexicons.merge(same) == [Entry("d0", ("bank", "edge", "shore"), "The side of it", ""), same[1]]


# ---------------------------------------------------------------------------------------------------------------------
# WordNet's splits
# ---------------------------------------------------------------------------------------------------------------------

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
SIZES = {"num_test_queries": 30, "corpus_size": 80, "num_dev_queries": 10, "dev_corpus_size": 30, "cluster_size": 20}


def word(rng: random.Random) -> str:
    return "".join(rng.sample(SYLLABLES, 3))


def write_wordnet(folder: Path) -> Path:
    """1,600 synsets, with lemmas that have several senses, that leak, and definitions that occur twice."""
    rng = random.Random(0)
    vocabulary = [word(rng) for _ in range(1500)]
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
            text = [word(rng) for _ in range(6)] + [lemmas[0]] * (rng.random() < 0.2)
            gloss = " ".join(text) + f'; "{lemmas[-1]} {word(rng)}"'
            if rng.random() < 0.03 and len(lines) > 1:
                gloss = lines[-1].partition(" | ")[2].upper()
            lines.append(synset(number, rng.choice(files), kind, lemmas, gloss))
        (folder / f"usr/share/wordnet/data.{part}").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def wordnet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordnet(tmp_path_factory.mktemp("wordnet"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexicons, "_MIN_CLUSTER", 20)


def check(built: tuple) -> None:
    """What must hold of WordNet's splits, whatever the text."""
    train, dev, test, (texts, labels) = built
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
    assert all(label.startswith(("noun.", "verb.")) for label in labels)


@pytest.mark.usefixtures("few")
def test_splits(wordnet_folder: Path) -> None:
    built = lexicons.wordnet(wordnet_folder, **SIZES)
    check(built)
    assert [len(built.test.queries), len(built.test.corpus)] == [30, 80]
    assert [len(built.dev.queries), len(built.dev.corpus)] == [10, 30]
    assert min(len(pairs) for pairs in built.train.values()) > 20
    assert Counter(built.clustering[1]) == {"noun.animal": 20, "noun.artifact": 20, "verb.motion": 20}
    files = {entry.text: entry.label for entry in all_synsets(wordnet_folder)}
    assert [files[text] for text in built.clustering[0]] == built.clustering[1]
    assert len(list(groupby(built.clustering[1]))) > 20  # mixed


@pytest.mark.parametrize(("minimum", "files"), [(1, {"noun.animal", "noun.artifact", "verb.motion"}), (10**6, set())])
def test_clusters(wordnet_folder: Path, monkeypatch: pytest.MonkeyPatch, minimum: int, files: set[str]) -> None:
    monkeypatch.setattr(lexicons, "_MIN_CLUSTER", minimum)
    assert set(lexicons.wordnet(wordnet_folder, **SIZES).clustering[1]) == files


def all_synsets(folder: Path) -> list:
    parts = ("noun", "verb", "adj", "adv")
    paths = [folder / f"usr/share/wordnet/data.{part}" for part in parts]
    return lexicons.merge(entry for path in paths for entry in lexicons.synsets(path.read_text().splitlines()))


def test_no_lemma_of_a_held_out_synset_is_trained_on(wordnet_folder: Path) -> None:
    """Nor is that of a synset which is in no corpus; and every other pair is there, in its part of speech."""
    built = lexicons.wordnet(wordnet_folder, **SIZES)
    parts = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    found = all_synsets(wordnet_folder)
    held_out = [e for e in found if lexicons._rank(0, "split", e.key) < lexicons._TEST + lexicons._DEV]
    assert len(held_out) > len(built.test.corpus) + len(built.dev.corpus)
    names = {name for entry in held_out for name in entry.names}
    keys = {entry.key for entry in held_out}
    assert built.test.corpus.keys() | built.dev.corpus.keys() <= keys
    expected: dict[str, set[tuple[str, str]]] = {part: set() for part in parts.values()}
    for entry in found:
        for name in set(entry.names) - names:
            if entry.key not in keys and name not in entry.text.lower().split():
                expected[parts[entry.label.split(".")[0]]].add((name, entry.text))
    for part, pairs in built.train.items():
        assert set(zip(pairs["anchor"], pairs["positive"], strict=True)) == expected[part]
    assert list(built.train["noun"]["anchor"]) != sorted(built.train["noun"]["anchor"])
    texts = {e.text: e.key for e in found}
    order = [texts[text] for text in built.train["noun"]["positive"]]
    assert order != sorted(order)


def test_relevance_in_the_split(wordnet_folder: Path) -> None:
    built = lexicons.wordnet(wordnet_folder, **{**SIZES, "num_dev_queries": 15})
    found = {entry.key: entry for entry in all_synsets(wordnet_folder)}
    for data in (built.dev, built.test):
        for query, name in data.queries.items():
            assert data.relevant[query] == {key for key in data.corpus if name in found[key].names}
            for entry in found.values():  # of all splits
                assert name not in entry.names or not lexicons.leaks(name, entry.text)
    assert max(map(len, built.test.relevant.values())) > 1
    of_test = {n for e in found.values() if lexicons._rank(0, "split", e.key) < lexicons._TEST for n in e.names}
    assert not of_test & set(built.dev.queries.values())


def dump(built: tuple) -> list:
    """Everything with its order."""
    train, dev, test, clustering = built
    return [
        {part: pairs.to_dict() for part, pairs in train.items()},
        *(
            [list(d.queries.items()), list(d.corpus.items()), {k: sorted(v) for k, v in d.relevant.items()}]
            for d in (dev, test)
        ),
        [list(part) for part in clustering],
    ]


def test_seeds(wordnet_folder: Path) -> None:
    first, again, other = (dump(lexicons.wordnet(wordnet_folder, seed, **SIZES)) for seed in (1, 1, 2))
    assert first == again
    assert all(a != b for a, b in zip(first[:3], other[:3], strict=True))


def test_sizes_move_nothing_between_splits(wordnet_folder: Path) -> None:
    small = lexicons.wordnet(wordnet_folder, **SIZES)
    large = lexicons.wordnet(
        wordnet_folder, num_test_queries=40, corpus_size=100, num_dev_queries=11, dev_corpus_size=31, cluster_size=3
    )
    assert list(large.test.queries.items())[:30] == list(small.test.queries.items())
    assert small.test.corpus.items() <= large.test.corpus.items()
    assert list(large.dev.queries.items())[:10] == list(small.dev.queries.items())
    assert dump(small)[0] == dump(large)[0]


@pytest.mark.usefixtures("few")
def test_order_and_hash_seed(wordnet_folder: Path, tmp_path: Path) -> None:
    """The same in another process with another hash seed, from files whose lines are in another order."""
    shuffled = tmp_path / "usr/share/wordnet"
    shuffled.mkdir(parents=True)
    seen: set[str] = set()
    for path in sorted((wordnet_folder / "usr/share/wordnet").iterdir()):
        lines = []
        for line in path.read_text().splitlines():  # what occurs twice is named after the first: keep that alone
            words = lexicons._words(lexicons.definition(line.partition(" | ")[2]))
            if words not in seen:
                lines.append(line)
                seen.add(words)
        path = shuffled / path.name
        path.write_text("\n".join(lines))
    here = dump(lexicons.wordnet(tmp_path, **SIZES))
    for path in shuffled.iterdir():
        path.write_text("\n".join(reversed(path.read_text().splitlines())))
    script = f"""
import importlib.util, json, sys, types
package = types.ModuleType("st_magnitude")  # without its __init__, which takes seconds
package.__path__ = [{str(SCRIPT.parents[1] / "st_magnitude")!r}]
sys.modules["st_magnitude"] = package
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_lexicons import SIZES, dump, lexicons
lexicons._MIN_CLUSTER = 20
print(json.dumps(dump(lexicons.wordnet({str(tmp_path)!r}, **SIZES))))
"""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(here))


def test_wordnet_errors(wordnet_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no .*data\.noun: fetch\('wordnet-base'\)"):
        lexicons.wordnet(tmp_path)
    (tmp_path / "usr/share/wordnet").mkdir(parents=True)
    (tmp_path / "usr/share/wordnet/data.noun").write_text("  1 licence\nno synset\n")
    with pytest.raises(DataError, match=r"usr/share/wordnet/data\.noun:2 is no synset"):
        lexicons.wordnet(tmp_path)
    with pytest.raises(DataError, match=r"1,000 queries over 5,000 documents .* of 1\d\d synsets of the test split"):
        lexicons.wordnet(wordnet_folder)
    with pytest.raises(DataError, match=r"10 queries over 999 documents .* synsets of the dev split"):
        lexicons.wordnet(wordnet_folder, **{**SIZES, "dev_corpus_size": 999})
    with pytest.raises(DataError, match="cluster_size must be at least 1, got 0"):
        lexicons.wordnet(wordnet_folder, **{**SIZES, "cluster_size": 0})


# ---------------------------------------------------------------------------------------------------------------------
# FOLDOC
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("digits", "number"), [("A", 0), ("Z", 25), ("a", 26), ("9", 61), ("+", 62), ("//", 4095)])
def test_dictd_number(digits: str, number: int) -> None:
    assert lexicons.dictd_number(digits) == number


def base64_digits(number: int) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return (base64_digits(number // 64) if number >= 64 else "") + alphabet[number % 64]


def write_foldoc(folder: Path, articles: list[tuple[list[str], str]]) -> Path:
    """A dictd database of (headwords, text), the index sorted by headword as dictfmt sorts it."""
    (folder / "usr/share/dictd").mkdir(parents=True)
    texts, index = b"", []
    for headwords, text in [(["00-database-info"], "00-database-info\nA dictionary.\n"), *articles]:
        article = f"{text}\n\n".encode()
        for headword in headwords:
            index.append(f"{headword.lower()}\t{base64_digits(len(texts))}\t{base64_digits(len(article))}\n")
        texts += article
    (folder / "usr/share/dictd/foldoc.index").write_text("".join(sorted(index)), encoding="utf-8")
    (folder / "usr/share/dictd/foldoc.dict.dz").write_bytes(gzip.compress(texts))
    return folder


def article(headwords: list[str], *paragraphs: str) -> tuple[list[str], str]:
    return headwords, "\n\n".join(["\n".join(headwords), *paragraphs])


def test_dictionary(tmp_path: Path) -> None:
    first, second = article(["Zeta Gerät", "ZG"], "   A thing of no use."), article(["alpha"], "   ä" * 3000)
    write_foldoc(tmp_path, [first, second])
    (one, two) = lexicons.dictionary(tmp_path / "usr/share/dictd/foldoc")
    assert one == (33, ["zeta gerät", "zg"], "Zeta Gerät\nZG\n\n   A thing of no use.\n\n")
    assert (two[1], two[2].strip()) == (["alpha"], second[1])


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("   <tool, text> A {line\n   editor} of old.", "A line editor of old."),
        ("   /zee'tah/ A thing.", "A thing."),
        ("   <tool> /zee'tah/ or /zay-t*/ A thing.", "A thing."),
        ("   A path /usr/bin/ed there.", "A path /usr/bin/ed there."),
        ("   (ZT) A thing.", "A thing."),
        ('   <tool> (Or "zt", ZETA) <tool> A thing.', "A thing."),
        ("   (EX) A thing.", "(EX) A thing."),
        ("   1. <tool> A thing.\n\n   2. /zee/ Another.", "1. A thing. 2. Another."),
        ("   A thing.\n\n   (1999-12-31)", "A thing."),
        ("   A thing.\n\n   [{Some File}]", "A thing."),
        ('   A thing.\n\n   ["On Things", A. N. Author,\n   1970].', "A thing."),
        ("   A thing.\n\n   {(http://example.org/)}.", "A thing."),
        ("   A thing.\n\n   {Their home\n   (http://example.org/a/b)}.", "A thing."),
        ("   A thing.\n\n   {Their home\n   \n(http://example.org/a/b)}.", "A thing."),
        ("   A thing by {Their firm (http://example.org/)} again.", "A thing by Their firm again."),
        ("   A thing by A. Author <a@example.org>.", "A thing by A. Author."),
        ("   A thing.  See also {other}, {thing}.", "A thing."),
        ("   A thing.\n\n   Compare {other},\n   {thing}.", "A thing."),
        ("   A thing.\n\n   {Usenet} newsgroup: {news:alt.thing}.", "A thing."),
        ("   A thing:\n\n    x = thing(1)\n\n   and so on.", "A thing: and so on."),
        ("       Indented from the first.\n\n       And on.", "Indented from the first. And on."),
        ("   A __very__ odd __name__.", "A very odd name."),
        ("   Of 3.14 and so on...", "Of 3.14 and so on..."),
        ("   See {other}.", ""),
        ("", ""),
    ],
)
def test_foldoc_text(text: str, cleaned: str) -> None:
    entry = lexicons.foldoc_entry("key", ["zeta", "zt"], f"Zeta\nZT\n\n{text}\n\n")
    assert entry.text == cleaned
    assert entry.names == ("Zeta", "ZT")


def test_foldoc_entry() -> None:
    text = "eta\n\n   <tool, text> one two three\n   four five six.\n\n   Seven."
    assert lexicons.foldoc_entry("k", ["eta", "Other"], text, 4) == Entry(
        "k", ("eta", "Other"), "one two three four", "tool"
    )


WORDS = "a machine with eight or more words in its description"


def test_foldoc(tmp_path: Path) -> None:
    write_foldoc(
        tmp_path,
        [
            article(["Zed", "ZZ Machine"], f"   (Zed) A first {WORDS}."),
            article(["leaking"], f"   A leaking {WORDS}."),
            article(["pointer"], "   See {Zed}, which has the words that are wanted here."),
            article(["short"], "   A machine with 7 or 12 words here."),
            article(["about"], f"   <introduction> This is about {WORDS}."),
            article(["Same"], f"   A second {WORDS}."),
            article(["Alias"], f"   <tool> A {{second}} {WORDS}."),
            article(["Shared"], f"   A third {WORDS}."),
            article(["shared", "Fourth Name"], f"   A fifth {WORDS}."),
        ],
    )
    expected = {
        "Zed": {"first"},
        "ZZ Machine": {"first"},
        "Same": {"second"},
        "Alias": {"second"},
        "Shared": {"third", "fifth"},
        "shared": {"third", "fifth"},
        "Fourth Name": {"fifth"},
    }
    asked = set()
    for seed in range(12):
        data = lexicons.foldoc(tmp_path, seed, num_queries=3, corpus_size=5)
        ordinals = {key: text.split()[1] for key, text in data.corpus.items()}
        assert sorted(ordinals.values()) == ["fifth", "first", "leaking", "second", "third"]
        assert len(data.queries) == 3
        for query, name in data.queries.items():
            assert {ordinals[document] for document in data.relevant[query]} == expected[name]
            asked.add(name)
    assert asked == expected.keys()
    with pytest.raises(DataError, match=r"3 queries over 6 documents .* of 5 entries of FOLDOC"):
        lexicons.foldoc(tmp_path, num_queries=3, corpus_size=6)
    longest = max(lexicons.foldoc(tmp_path, num_queries=1, corpus_size=5, max_words=9).corpus.values(), key=len)
    assert len(longest.split()) == 9
    with pytest.raises(DataError, match=r"of 6 entries of FOLDOC"):  # with the short one
        lexicons.foldoc(tmp_path, num_queries=1, corpus_size=9, min_words=5)


def test_foldoc_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no .*foldoc\.index: fetch\('dict-foldoc'\)"):
        lexicons.foldoc(tmp_path)
    folder = write_foldoc(tmp_path, [article(["zeta"], f"   A first {WORDS}.")]) / "usr/share/dictd"
    index = (folder / "foldoc.index").read_text()
    for line in ("zeta\tA\t", "zeta\tA", "zeta\tA\tB!", "zeta\tA\tZZZZ"):
        (folder / "foldoc.index").write_text(index + line + "\n")
        if line != "zeta\tA\t":  # no digits: 0
            with pytest.raises(DataError, match=r"foldoc\.index:3 is no headword, offset and length within the texts"):
                lexicons.foldoc(tmp_path, num_queries=1, corpus_size=1)
    (folder / "foldoc.index").write_text(index)
    whole = (folder / "foldoc.dict.dz").read_bytes()
    for broken in (whole[:-20], b"plain text", whole[:20] + b"\xff" * 20 + whole[40:]):
        (folder / "foldoc.dict.dz").write_bytes(broken)
        with pytest.raises(DataError, match=r"foldoc\.dict\.dz is damaged .* remove the package's folder"):
            lexicons.foldoc(tmp_path, num_queries=1, corpus_size=1)


# ---------------------------------------------------------------------------------------------------------------------
# Packages
# ---------------------------------------------------------------------------------------------------------------------

FILES = {package: list(names) for package, names in lexicons._CONTENTS.items()}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, none at first, and a system that has no package installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(lexicons, "_SYSTEM", tmp_path / "system")
    monkeypatch.delenv("ST_MAGNITUDE_CACHE", raising=False)
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    (folder / name).chmod(0o755)


def apt_get(folder: Path, script: str = "") -> None:
    """It writes an archive that holds its arguments, and counts its calls."""
    script = script or 'for package; do :; done; echo "$@" > "${package}_1_all.deb"; echo "W: unsandboxed" >&2'
    program(folder, "apt-get", f'echo "$@" >> {folder}/calls\n{script}')


def dpkg(folder: Path, name: str = "dpkg", files: Iterable[str] = FILES["wordnet-base"], after: str = "") -> None:
    """Called as ``dpkg -x ARCHIVE FOLDER``."""
    made = "\n".join(f'mkdir -p "$3/{Path(file).parent}"; echo text > "$3/{file}"' for file in files)
    program(folder, name, f'test "$1" = -x && test -s "$2" || exit 9\n{made}\n{after}')


@pytest.mark.parametrize("extractor", ["dpkg", "dpkg-deb"])
def test_fetch(tools: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], extractor: str) -> None:
    apt_get(tools)
    dpkg(tools, extractor)
    cache = tmp_path / "new" / "cache"
    folder = lexicons.fetch("wordnet-base", cache)
    assert folder == cache / "wordnet-base"
    assert all((folder / name).is_file() for name in FILES["wordnet-base"])
    assert os.listdir(cache) == ["wordnet-base"]  # neither archive nor temporary folder
    assert capfd.readouterr() == ("", "")  # no warning of apt-get's
    assert "download wordnet-base" in (tools / "calls").read_text()
    for tool in ("apt-get", extractor):
        (tools / tool).unlink()
    assert lexicons.fetch("wordnet-base", str(cache)) == folder  # once there, nothing is called


def test_fetch_another_package(tools: Path, tmp_path: Path) -> None:
    apt_get(tools)
    dpkg(tools, files=["usr/share/doc/words/words.txt"])
    assert (lexicons.fetch("words", tmp_path) / "usr/share/doc/words/words.txt").is_file()
    with pytest.raises(DataError, match=r"Cannot fetch .* wordnet-base: it has no usr/share/wordnet/data\.noun"):
        lexicons.fetch("wordnet-base", tmp_path)
    assert not (tmp_path / "wordnet-base").exists()


def test_interrupted_extraction_is_not_taken_as_complete(tools: Path, tmp_path: Path) -> None:
    apt_get(tools)
    dpkg(tools, files=FILES["wordnet-base"][:1], after="echo 'dpkg: no space left' >&2; exit 2")
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"wordnet-base: dpkg failed: dpkg: no space left\. By hand"):
        lexicons.fetch("wordnet-base", cache)
    assert os.listdir(cache) == []
    remains = cache / ".wordnet-base-killed" / "extracted" / "usr/share/wordnet"  # of a process that was killed
    remains.mkdir(parents=True)
    (remains / "data.noun").write_text("half")
    dpkg(tools)
    folder = lexicons.fetch("wordnet-base", cache)
    assert (folder / FILES["wordnet-base"][0]).read_text() == "text\n"
    assert (folder / FILES["wordnet-base"][-1]).is_file()


def test_incomplete_folder(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "dict-foldoc/usr/share/dictd").mkdir(parents=True)
    (tmp_path / "dict-foldoc/usr/share/dictd/foldoc.dict.dz").write_bytes(b"")
    with pytest.raises(DataError, match=r"dict-foldoc has no usr/share/dictd/foldoc\.index: remove that folder"):
        lexicons.fetch("dict-foldoc", tmp_path)


def test_another_process_was_faster(tools: Path, tmp_path: Path) -> None:
    apt_get(tools)
    target = tmp_path / "wordnet-base"
    dpkg(
        tools,
        after="\n".join(f'mkdir -p "$(dirname {target}/{f})"; echo other > {target}/{f}' for f in FILES[target.name]),
    )
    assert lexicons.fetch("wordnet-base", tmp_path) == target
    assert (target / FILES["wordnet-base"][0]).read_text() == "other\n"
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("have", "message"),
    [
        ([], "there is no apt-get here"),
        (["apt-get"], "there is no dpkg-deb here"),
        (["no network"], "apt-get failed: E: Could not resolve host"),
        (["says nothing"], "apt-get failed: exit 3"),
        (["no archive", "dpkg"], "it has no usr/share/wordnet/data.noun"),
    ],
)
def test_what_to_do_by_hand(tools: Path, tmp_path: Path, have: list[str], message: str) -> None:
    if "apt-get" in have:
        apt_get(tools)
    if "no network" in have:
        apt_get(tools, "echo 'W: a warning' >&2; echo 'E: Could not resolve host' >&2; exit 100")
    if "says nothing" in have:
        apt_get(tools, "exit 3")
    if "no archive" in have:
        apt_get(tools, ":")
        dpkg(tools)
    with pytest.raises(DataError) as error:
        lexicons.fetch("wordnet-base", tmp_path / "cache")
    said = str(error.value)
    assert said.startswith(f"Cannot fetch the Debian package wordnet-base: {message}. By hand")
    assert f"apt-get download wordnet-base && dpkg -x wordnet-base_*.deb {tmp_path / 'cache/wordnet-base'}" in said
    assert "ST_MAGNITUDE_CACHE (or --cache)" in said
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("name", ["--help", "../wordnet", "WordNet", "", "a"])
def test_no_package(tools: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match="is no name of a Debian package; those used here are wordnet-base, dict-foldoc"
    ):
        lexicons.fetch(name, tmp_path)


def test_system_wide_installation(tools: Path, tmp_path: Path) -> None:
    for name in FILES["dict-foldoc"]:
        path = tmp_path / "system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert lexicons.fetch("dict-foldoc", tmp_path / "cache") == tmp_path / "system"
    assert not (tmp_path / "cache").exists()
    path.unlink()
    with pytest.raises(DataError, match="there is no apt-get here"):
        lexicons.fetch("dict-foldoc", tmp_path / "cache")


def test_default_cache(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt_get(tools)
    dpkg(tools)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert lexicons.fetch("wordnet-base") == tmp_path / "home/.cache/st_magnitude/wordnet-base"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert lexicons.fetch("wordnet-base") == tmp_path / "xdg/st_magnitude/wordnet-base"
    monkeypatch.setenv("ST_MAGNITUDE_CACHE", str(tmp_path / "mine"))
    assert lexicons.fetch("wordnet-base") == tmp_path / "mine/wordnet-base"


@pytest.mark.usefixtures("tools", "few")
def test_build(
    wordnet_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a cache, and as the script does it."""
    (tmp_path / "wordnet-base").symlink_to(wordnet_folder)
    rng = random.Random(0)
    articles = [article([f"{word(rng)} {i}"], f"   {' '.join(word(rng) for _ in range(9))}.") for i in range(40)]
    write_foldoc(tmp_path / "dict-foldoc", articles)
    sizes = {**SIZES, "num_foldoc_queries": 4, "foldoc_corpus_size": 9}
    built = lexicons.build(tmp_path, 3, **sizes)
    assert isinstance(built, lexicons.Lexicons)
    assert dump((built.train, built.dev, built.test, built.clustering)) == dump(
        lexicons.wordnet(wordnet_folder, 3, **SIZES)
    )
    assert built.foldoc == lexicons.foldoc(tmp_path / "dict-foldoc", 3, num_queries=4, corpus_size=9)
    assert built.foldoc != lexicons.foldoc(tmp_path / "dict-foldoc", 4, num_queries=4, corpus_size=9)
    assert isinstance(built.foldoc, RetrievalData)

    monkeypatch.setattr(lexicons, "build", lambda cache, seed: built if (cache, seed) == ("here", 3) else None)
    monkeypatch.setattr(sys, "argv", ["lexicons.py", "--cache", "here", "--seed", "3"])
    lexicons.main()
    printed = capsys.readouterr().out
    assert f"train, verb: {len(built.train['verb'])} pairs" in printed
    assert "test: 30 queries, 80 documents" in printed
    assert "clustering: 60 texts of 3 files" in printed
    assert f"  {built.train['noun'][0]['anchor']} -> {built.train['noun'][0]['positive']}\n" in printed


def test_script_error(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lexicons.py", "--cache", str(tmp_path / "cache")])
    with pytest.raises(SystemExit) as error:
        lexicons.main()
    assert error.value.code == 1
    assert capsys.readouterr().err.startswith("Cannot fetch the Debian package wordnet-base: there is no apt-get here")


def test_real_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are, in the cache or system-wide."""
    monkeypatch.setenv("PATH", "")  # no download
    try:
        built = lexicons.build()
    except DataError as error:
        pytest.skip(str(error))
    check((built.train, built.dev, built.test, built.clustering))
    assert sum(map(len, built.train.values())) > 100_000
    assert [len(built.test.queries), len(built.test.corpus), len(built.foldoc.corpus)] == [1000, 5000, 3000]
    assert 2000 <= len(built.clustering[0]) <= 3000
    assert 20 <= len(set(built.clustering[1])) <= 40
    dirty = [text for data in (built.dev, built.test) for text in data.corpus.values() if '"' in text or "_" in text]
    assert dirty == []
    for text in built.foldoc.corpus.values():
        assert len(text.split()) <= 80
    marked = [text for text in built.foldoc.corpus.values() if text.startswith("<") or "{(" in text]
    assert len(marked) < 10  # what is misspelt in the source
