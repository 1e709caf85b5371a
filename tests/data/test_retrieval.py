"""RetrievalData, and BEIR folders read, written and refused."""

import gzip
import json
import math
import unicodedata
from functools import cached_property
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

from st_magnitude.data.beir import HEADER, DataError, canonical, splits_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.files.pairs import load_splits

CORPUS = {f"d{i}": f"text {i}" for i in range(8)}
DATA = RetrievalData(
    queries={"q1": "first?", "q2": "sécond?", "q3": "unjudged?"},
    corpus=CORPUS,
    relevant={"q1": {"d0", "d1"}, "q2": {"d2"}},
    negatives={"q1": {"d3", "d4"}, "q2": {"d0"}},
)

QUERIES = '{"_id": "q1", "text": "first?"}\n{"_id": "q2", "text": "second?"}\n'
QUERIES += '{"_id": "qé", "text": "third?"}\n'
QRELS = "query-id\tcorpus-id\tscore\nq1\td0\t1\n"


def write(
    folder: Path, corpus: str | bytes = "", queries: str = QUERIES, qrels: str = QRELS
) -> Path:
    """A folder that is well-formed where it is not told otherwise."""
    corpus = corpus or "\n".join(
        json.dumps({"_id": key, "text": text}) for key, text in CORPUS.items()
    )
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_bytes(corpus if isinstance(corpus, bytes) else corpus.encode())
    (folder / "queries.jsonl").write_text(queries)
    (folder / "qrels" / "test.tsv").write_text(qrels)
    return folder


def test_round_trip(tmp_path):
    """Ids with quotes and tabs, and a query that no document answers, which stays in its split."""
    queries = {'"q" 1': 'a "quoted"\nquestion, é\u2028?', "q\t2": "second?"}
    corpus = {'"': " padded ", "e": "x\ty", "f": "graded"}
    relevant = {'"q" 1': {'"': 1, "f": 3}, "q\t2": {}}
    data = RetrievalData(queries, corpus, relevant, {'"q" 1': {"e"}})
    assert data.negatives == {'"q" 1': {"e"}, "q\t2": set()}
    data.save(tmp_path / "new", "dev")
    assert load_splits(tmp_path / "new")["dev"] == data
    write(tmp_path, qrels='"query-id"\t"corpus-id"\t"relevance"\n"q1"\t"d0"\t2.0\n"q2"\t\t0\n')
    read = load_splits(tmp_path)["test"]
    assert (read.relevant, read.negatives) == ({"q1": {"d0": 2}}, {"q2": set()})


def test_part_of_the_data_remembers_nothing_of_the_whole():
    """Of everything that is computed once; the corpus and its order are shared."""
    names = [name for name, x in vars(RetrievalData).items() if isinstance(x, cached_property)]
    queries = DATA.queries | {"d2": "text 2"}  # the last one is a document
    data = RetrievalData(queries, CORPUS, DATA.relevant | {"d2": {"d5"}}, DATA.negatives)
    whole = {name: getattr(data, name) for name in names}
    part = data.only({"q2"})
    fresh = RetrievalData({"q2": "sécond?"}, CORPUS, {"q2": {"d2"}})
    for name in names:
        assert np.array_equal(getattr(part, name), getattr(fresh, name)), name
    assert {name for name in names if getattr(part, name) is whole[name]} == {
        "document_ids",
        "position",
    }
    asking = data.asking(["new?"])
    assert (asking.queries, asking.own, asking.is_relevant.any()) == (
        {"new?": "new?"},
        set(),
        False,
    )
    with pytest.raises(DataError, match="None of the 1 queries"):
        asking.query_ids  # noqa: B018


@pytest.mark.parametrize(
    ("title", "collision"),
    [("", False), ("A title ", False), ("", True)],
    ids=["text", "title", "id alone"],
)
def test_the_query_itself_never_counts(tmp_path, title, collision):
    """Neither in a search nor as a negative; unless the id alone is the same."""
    queries = {"q1": "first?", "q2": "second?"}
    itself = "something else" if collision else f"{title}first?"
    corpus = {"q1": itself, "d0": "first?", "d1": "other"}
    judged = {"q1": 1} if collision else {}
    data = RetrievalData(queries, corpus, {"q1": {"d0": 1, **judged}, "q2": {"d1"}}, {"q2": {"q1"}})
    assert (data.own == {"q1"}) is not collision
    assert data.own_columns(["q2", "q1"]).tolist() == [-1, -1 if collision else 2]
    rows = [row for seed in range(9) for row in data.triplets(1, seed)]
    assert {row["negative_1"] for row in rows if row["anchor"] == "first?"} == {"other"}


@pytest.mark.parametrize("text", ["first?", "A title first?"])
@pytest.mark.parametrize("grade", [0, 1])
def test_a_judged_document_is_not_the_query_itself(text, grade):
    relevant = {"q1": {"d0": 1, "q1": grade}}
    data = RetrievalData({"q1": "first?"}, {"q1": text, "d0": "other"}, relevant)
    assert not data.own
    assert (data.relevant["q1"].keys() | data.negatives.get("q1", set())) == {"d0", "q1"}


def test_split_selects_queries(tmp_path):
    DATA.save(tmp_path, "train")
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq3\td7\t2\n")
    assert splits_of(tmp_path) == ["test", "train"]
    (tmp_path / "qrels" / "._test.tsv").write_bytes(b"\0\5\26\7")  # as macOS writes
    splits = load_splits(tmp_path)
    train, test = splits["train"], splits["test"]
    assert train.queries == {key: DATA.queries[key] for key in ("q1", "q2")}
    assert (test.relevant, test.negatives) == ({"q3": {"d7": 2}}, {})


def test_titles_and_instructions_are_joined_and_ids_may_be_numbers(tmp_path):
    corpus = '{"_id": 7, "title": "A title", "text": "and text"}\n\n'
    corpus += '{"_id": "8", "title": "", "text": "alone"}\n'
    queries = '{"_id": "q1", "title": "no", "text": "one"}\n'
    queries += '{"_id": "q2", "text": "one", "instruction": "in French"}\n'
    data = load_splits(write(tmp_path, corpus, queries, "q1 7 1\nq1\t8\t0\nq2 8 1"))["test"]
    assert data.corpus == {"7": "A title and text", "8": "alone"}
    assert data.queries == {"q1": "one", "q2": "one in French"}
    assert data.relevant == {"q1": {"7": 1}, "q2": {"8": 1}}
    assert data.negatives == {"q1": {"8"}}


@pytest.mark.parametrize(
    "qrels",
    [
        "q1 0 d0 2\nq1 0 d1 0\nq2 0 d1 -1\n",
        "topic Q0 docno rel\nq1 Q0 d0 2\nq1 Q0 d1 0\nq2 Q0 d1 -1\n",
        "Query ID\tdoc_id\tgain\rq1\td0\t2\rq1\td1\t0\rq2\td1\t-1\r",
    ],
    ids=["TREC", "TREC with a header", "old Macintosh"],
)
def test_columns_of_judgments(tmp_path, qrels):
    data = load_splits(write(tmp_path, qrels=qrels))["test"]
    assert (data.relevant, data.negatives) == ({"q1": {"d0": 2}}, {"q1": {"d1"}, "q2": {"d1"}})


def test_a_split_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path, qrels="q1\td0\t1\n")
    with pytest.raises(DataError, match=r"has no split 'dev'; its splits are \['test'\]"):
        load_splits(tmp_path)["dev"]
    (tmp_path / "qrels" / "train.tsv").write_bytes(b"q2\td1\t1\n\xff\n")
    with pytest.raises(DataError, match=r"train.tsv, line 2: is not UTF-8"):
        load_splits(tmp_path)


@pytest.mark.parametrize(
    "text", ["Ａｎ e\u0301tude,  NO 1?", "an \u200bétude no. 1", "«An étude», no 1…"]
)
def test_texts_that_are_one_query(text):
    assert canonical(text) == "an étude no 1"
    texts = {"train": "an étude no 1", "dev": text}
    parts = {name: RetrievalData({name: x}, {"d": "x"}, {name: {"d"}}) for name, x in texts.items()}
    with pytest.raises(DataError, match="1 queries of the dev split are also in the train split"):
        load_splits(parts).check_held_out("dev")


def test_texts_that_are_several_queries():
    texts = ["C", "C++", "C#", "+", "?", "!", "कि", "का", "1 %", "1", "1.5", "1 5", ".5", "5"]
    texts += ["x = -1?", "x = 1?", "-5 K", "5 K", "-.5", "10-2", "10 2", "1e-5", "1e 5"]
    texts += ["١٫٥", "١ ٥", "x²", "x2", "x⁻²", "10²", "102"]
    assert len({canonical(text) for text in texts} - {""}) == len(texts)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("x² = −1.", "X^2 = -1"), ("covid-19", "covid 19"), ("no.5", "no 5"), ("1.0-2.", "1.0–2"),
        ("wait…5", "wait 5"), ("e.g. 'a - b'", "e g a b"), ("10²³", "10^23"), ("end.-", "end"),
    ],
)  # fmt: skip
def test_numbers_have_one_spelling_and_other_punctuation_none(text, other):
    assert canonical(text) == canonical(other)


def test_the_spelling_of_a_spelling_is_itself():
    for letter in map(chr, range(0x110000)):
        kind = unicodedata.category(letter)
        if kind not in ("Cn", "Co", "Lo") or unicodedata.decomposition(letter):
            text = canonical(f"{letter}-1{letter}.2 a{letter}-.3")
            assert canonical(text) == text, hex(ord(letter))


def test_ascii_is_spelled_as_it_is_next_to_other_letters():
    for a, b in product(map(chr, range(128)), repeat=2):
        assert canonical(f"{a}{b}B é") == f"{canonical(f'{a}{b}B')} é"


LONG = "x" * 90_000  # of which a message shows the beginning
GOOD = '{"_id": "d0", "text": "t"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"_id": "d1", "text": ', "is not valid JSON"),
        (b'{"text": "t"}', r"is not an object .*_id.*, but {'text': 't'}"),
        (json.dumps({"_id": LONG, "text": "half \ud83d"}).encode(), "'xxx.* is not Unicode"),
        (b'{"_id": "d1", "text": ["t"]}', "is not an object"),
        (GOOD.encode(), "repeats the id 'd0'"),
        (b'{"_id": "d1", "text": "\xe9"}', "is not UTF-8"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_malformed_texts_are_named(tmp_path, line, message):
    with pytest.raises(DataError, match=rf"corpus\.jsonl, line 2: {message}") as refused:
        load_splits(write(tmp_path, GOOD.encode() + line))["test"]
    assert len(str(refused.value)) < 800


MOVED = [" ".join(names) for names in permutations(HEADER) if names != HEADER]
MOVED += ["query-id corpus-id", "query-id corpus-id score rank", "topic docno iter rel"]


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("query-id\tcorpus-id\tscore\nq9\td0\t1\n", r", line 2: 'q9' is not in queries\.jsonl"),
        (f"{LONG} d0 1\n", ", line 1: 'xxx.* is not in queries"),
        (f"q1 d0 {LONG}\n", ", line 1: the score 'xxx"),
        ("q1 7.0 1\n", ", line 1: .* where it is '7', not '7.0'"),
        ("q1\td99\t1\n", r", line 1: 'd99' is not in corpus\.jsonl, .*--skip-empty"),
        ("q1\td0\n", r", line 1: has the columns \['q1', 'd0'\], but needs three"),
        ("q1\td0\t1\nq1\td0\n", ", line 2: has 2 columns, not 3"),
        ("query-id\tcorpus-id\tscore\twho\nq1\td0\t1\tme\n", ", line 1: has the columns"),
        *((f"{names}\n", ", line 1: has the columns") for names in MOVED),
        ("1 q1 d0\n", ", line 1: the score 'd0'"),
        ("q1\td0\t1e300\n", ", line 1: the score '1e300' is not a whole number below"),
        ("q1\t" + "d" * 200_000 + "\t1\n", r", line 1: is not split by tabs \(field larger"),
        ("qe\u0301\td0\t1\n", r", line 1: .* is not in queries.jsonl, .*where it is 'q\\xe9', not"),
        ("q1\td0\t1\nq1\td0\t0\n", ", line 2: contradicts .* 'd0' and 'q1'"),
        ("q1\td0\t0\n", ".*: no document is relevant"),
    ],
)
def test_malformed_judgments_are_named(tmp_path, qrels, message):
    corpus = "\n".join(json.dumps({"_id": key, "text": "t"}) for key in [*CORPUS, "7"])
    with pytest.raises(DataError, match=rf"qrels/test\.tsv{message}") as refused:
        load_splits(write(tmp_path, corpus, qrels=qrels))["test"]
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize("missing", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_missing_files_are_named(tmp_path, missing):
    (write(tmp_path) / missing).unlink()
    with pytest.raises(DataError, match=rf"has no ({missing}|qrels/train\.tsv)"):
        load_splits(tmp_path)["test"]


@pytest.mark.parametrize(
    ("relevant", "negatives", "message"),
    [
        ({"q9": {"d0"}}, {}, "relevant has the query 'q9'"),
        ({"q1": {"d0", "d99"}}, {}, "of relevant .*'d99'"),
        ({}, {"q1": {"d99"}}, "of negatives .*'d99'"),
        ({"q1": {"d0"}}, {"q1": {"d0"}}, "'d0' is both .* 'q1'"),
        ({"q1": "d0"}, {}, "is 'd0'"),
        ({"q1": {"d0": 0.5}}, {}, "score 0.5"),
        ({"q1": {7}}, {}, r"of relevant .*\[7\], where it is '7', not 7:"),
        ({1: {"d0"}}, {}, "the query 1, which is not in queries;"),
        ({"q1": {"d0": math.nan}}, {}, "score nan"),
    ],
)
def test_inconsistent_judgments(relevant, negatives, message):
    with pytest.raises(DataError, match=message):
        RetrievalData(DATA.queries, CORPUS | {"7": "seven"}, relevant, negatives)


@pytest.mark.parametrize("odd", [{7: "seven"}, {"7": None}, {"7": math.nan}])
def test_ids_and_texts_are_strings(odd):
    with pytest.raises(DataError, match=r"corpus has .*7.*ids and texts are strings"):
        RetrievalData(DATA.queries, CORPUS | odd, {})


@pytest.mark.parametrize("num_negatives", [0, 1, 5])
def test_triplets(num_negatives):
    rows = list(DATA.triplets(num_negatives, seed=3))
    expected = {
        (DATA.queries[q], CORPUS[d]) for q, documents in DATA.relevant.items() for d in documents
    }
    assert {(row["anchor"], row["positive"]) for row in rows} == expected
    assert len(rows) == 3
    by_text = {text: key for key, text in DATA.queries.items()}
    for row in rows:
        numbered = [f"negative_{i}" for i in range(1, num_negatives + 1)]
        assert list(row) == ["anchor", "positive", *numbered]
        query, negatives = by_text[row["anchor"]], list(row.values())[2:]
        judged = {CORPUS[d] for d in DATA.negatives[query]}
        assert len(set(negatives)) == num_negatives
        assert not {CORPUS[d] for d in DATA.relevant[query]} & set(negatives)
        # judged ones come before random ones
        assert len(judged & set(negatives)) == min(num_negatives, len(judged))


def test_triplets_do_not_depend_on_the_order_of_judgments():
    judged = (DATA.relevant, DATA.negatives)
    turned = [{q: list(ids)[::-1] for q, ids in reversed(all.items())} for all in judged]
    rows = RetrievalData(DATA.queries, CORPUS, *turned).triplets(3)
    assert rows.to_dict() == DATA.triplets(3).to_dict()


def test_compressed_texts(tmp_path):
    plain = load_splits(write(tmp_path / "plain"))["test"]
    write(tmp_path / "packed")
    for name in ("corpus.jsonl", "queries.jsonl"):
        path = tmp_path / "packed" / name
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert load_splits(tmp_path / "packed")["test"] == plain
    path.with_name(f"{name}.gz").write_bytes(path.with_name(f"{name}.gz").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"queries\.jsonl\.gz is damaged .*; fetch it again"):
        load_splits(tmp_path / "packed")["test"]


def test_missing_texts_are_left_out_with_their_judgments(tmp_path, caplog):
    corpus = GOOD + '{"_id": "d1", "title": " ", "text": ""}\n'
    queries = '{"_id": "q1", "text": "first?"}\n{"_id": "q2", "text": " "}\n'
    qrels = "q1\td0\t1\nq1\td1\t1\nq2\td0\t1\nq1\td9\t0\nq9\td0\t1\n"
    folder = write(tmp_path, corpus, queries, qrels)
    with pytest.raises(DataError, match=r"'d1' is not in .*, or is empty there; .*--skip-empty"):
        load_splits(folder)["test"]
    data = load_splits(folder, skip_empty=True)["test"]
    assert "4 judgments of texts that are empty or absent" in caplog.text
    assert (data.queries, data.corpus) == ({"q1": "first?"}, {"d0": "t"})
    assert data.relevant == {"q1": {"d0": 1}}


def test_log_prior():
    judged = {"q1": {"d0": 3, "d1": 0}, "q2": {"d0", "d2"}}
    data = RetrievalData({"q1": "?", "q2": "?", "q3": "?"}, CORPUS, judged)
    counts = dict.fromkeys(CORPUS, 0) | {"d0": 2, "d2": 1}
    prior = {key: math.exp(value) for key, value in data.log_prior().items()}
    assert prior == pytest.approx({key: (n + 1) / 11 for key, n in counts.items()})
    assert sum(prior.values()) == pytest.approx(1)
    unjudged = RetrievalData(data.queries, CORPUS, {}).log_prior()
    assert unjudged == pytest.approx(dict.fromkeys(CORPUS, -math.log(8)))
