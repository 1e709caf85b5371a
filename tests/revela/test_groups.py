"""Documents to groups of chunks, and groups to batches."""

from collections import Counter

import pytest
import torch
from _texts import CODE, chunks_of, document, write
from _tiny import tokenizer as tiny_tokenizer
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformerTrainer

from st_magnitude.data.documents import fold
from st_magnitude.revela import build_groups, chunk
from st_magnitude.revela.groups import GroupCollator

OPTIONS = {"max_words": 6, "min_words": 1}


def test_the_order_of_the_paper():
    lengths = {"a": 3, "b": 5, "c": 2, "d": 1, "e": 2}
    a, b, c, d, e = (chunks_of(name, number) for name, number in lengths.items())
    documents = [document(name, number) for name, number in lengths.items()]
    groups = build_groups(documents, group_size=4, **OPTIONS)
    assert groups.column_names == ["chunks", "code"]
    order = [a[0], b[0], a[1], b[1], a[2], b[2], b[3], b[4], c[0], d[0], c[1], e[0], e[1]]
    assert groups["chunks"][:] == [order[0:4], order[4:8], order[8:12]]  # e[1] alone is no group
    five = build_groups([document("a", 3), document("b", 3)], group_size=4, **OPTIONS)
    assert [len(row["chunks"]) for row in five] == [4, 2]


SENTENCES = st.lists(st.sampled_from([f"{w} is here." for w in "Abcdefgh"]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(SENTENCES, min_size=1, max_size=6), st.integers(2, 5))
def test_no_duplicates_in_a_group(documents, group_size):
    loud = ([s if i % 2 else s.upper() for i, s in enumerate(d)] for d in documents)
    texts = ["  ".join(sentences) for sentences in loud]
    options = {"max_words": 3, "min_words": 1, "group_size": group_size}
    given_chunks = Counter(fold(s) for d in documents for s in d)
    if len(given_chunks) < 2:
        with pytest.raises(ValueError, match="at least 2 different chunks"):
            build_groups(texts, **options)
        return
    rows = [[fold(c) for c in row["chunks"]] for row in build_groups(texts, **options)]
    assert all(len(set(row)) == len(row) for row in rows)
    for i, row in enumerate(rows):  # a short group means that nothing else is left for it
        later = {c for other in rows[i + 1 :] for c in other}
        assert len(row) == group_size or later <= set(row)
    assert all(2 <= len(row) <= group_size for row in rows)
    kept = Counter(c for row in rows for c in row)
    assert not kept - given_chunks
    assert len(given_chunks - kept) <= 1  # copies of one text: two different ones would be a group


def test_code_is_marked_for_each_document():
    documents = [{"text": CODE, "code": True}, document("prose", 2)]
    groups = build_groups(documents, group_size=2, max_words=14, min_words=1)
    rows = (zip(row["chunks"], row["code"], strict=True) for row in groups)
    pieces = chunk(CODE, 14, code=True)
    assert {text for row in rows for text, is_code in row if is_code} == set(pieces)


def test_every_source_gives_the_same_groups(tmp_path):
    texts = [document("a", 3), document("b", 4), document("c", 2)]
    write(tmp_path / "folder", **{f"{i}__txt": text for i, text in enumerate(texts)})
    sources = {
        "generator": (text for text in texts),
        "mappings": [{"text": text, "other": 1} for text in texts],
        "dataset": Dataset.from_dict({"id": [1, 2, 3], "text": texts, "image": [b"x"] * 3}),
        "folder": tmp_path / "folder",
    }
    expected = build_groups(texts, group_size=4, **OPTIONS).to_list()
    for name, source in sources.items():
        assert build_groups(source, group_size=4, **OPTIONS).to_list() == expected, name


def test_min_words():
    text = "One two three four five. Six."
    [row] = build_groups([text, "Seven eight nine ten eleven."], max_words=5)
    assert row["chunks"] == ["One two three four five.", "Seven eight nine ten eleven."]


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["a", "b"], {"group_size": 1}, "group_size must be at least 2"),
        (["a", "b"], {"max_words": 0}, "max_words must be at least 1"),
        ([], {}, "0 documents"),
        (["One.", "Two."], {}, "2 documents have 0"),
        ([3], {}, r"documents\[0\].*int"),
        ([{"chunks": ["a", "b"]}], {}, r"'text'.*\['chunks'\]"),
    ],
)
def test_what_gives_no_groups_is_refused(documents, options, message):
    with pytest.raises(ValueError, match=message):
        build_groups(documents, **options)


LINES = ["the sky is\n blue", "lima", "sort the list of all words that it has"]
ROWS = [
    {"chunks": ["open a file for reading", "what is rain"], "code": [False, True]},
    {"chunks": LINES, "code": [False] * 3, "id": 1},
]
FLAT = [text for row in ROWS for text in row["chunks"]]
HALVES = ["open a file", "what is rain", "the sky", "lima", "sort the list of all"]


@pytest.fixture
def lm_tokenizer():
    """As of many language models: without a token for padding."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", None
    return tokenizer


def test_three_sets_of_features(model, lm_tokenizer):
    collator = GroupCollator(model.preprocess, lm_tokenizer)
    query, passage, lm = collator.features(ROWS)
    features, labels = SentenceTransformerTrainer.collect_features(None, collator(ROWS))
    assert labels is None
    for ours, theirs in zip((query, passage, lm), features, strict=True):
        assert ours.keys() == theirs.keys()
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    for found, prefix, texts in ((query, "Query: ", HALVES), (passage, "Passage: ", FLAT)):
        expected = model.preprocess([prefix + text for text in texts])
        for key in ("input_ids", "attention_mask"):
            assert torch.equal(found[key], expected[key])
        assert model(found)["sentence_embedding"].shape == (5, 32)
    assert lm["group"].tolist() == [0, 0, 1, 1, 1]
    for i, text in enumerate(FLAT):
        ids = lm_tokenizer(text)["input_ids"]
        padding = [0] * (lm["input_ids"].shape[1] - len(ids))
        assert lm["input_ids"][i].tolist() == ids + padding
        assert lm["attention_mask"][i].tolist() == [1] * len(ids) + padding
    prose, *_ = collator.features([{"chunks": row["chunks"]} for row in ROWS])
    assert not torch.equal(prose["input_ids"], query["input_ids"])  # the second text is a half too


def test_lengths(model, lm_tokenizer):
    options = {"max_length": 5, "prefixes": ("a: ", "b: ")}
    batch = GroupCollator(model.preprocess, lm_tokenizer, **options)(ROWS)
    assert {batch[f"{name}_input_ids"].shape for name in ("query", "passage", "lm")} == {(5, 5)}
    assert batch["lm_input_ids"][4].tolist() == lm_tokenizer("sort the list of all")["input_ids"]


@pytest.mark.parametrize(
    "row", [{"text": "a chunk"}, {"chunks": "a chunk"}, {"chunks": ["a chunk"]}]
)
def test_one_row_must_be_one_group(model, lm_tokenizer, row):
    with pytest.raises(ValueError, match="one group"):
        GroupCollator(model.preprocess, lm_tokenizer)([ROWS[0], row])
