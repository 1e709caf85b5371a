"""Files to documents, and documents to chunks of sentences or of code."""

import sys

import pytest
from _texts import write
from hypothesis import given, settings
from hypothesis import strategies as st

from st_magnitude.data.beir import DataError
from st_magnitude.data.documents import sentences
from st_magnitude.revela import chunk, read_documents


def test_a_folder(tmp_path, caplog):
    write(tmp_path, b__txt="plain", a__md="# T\nx", c__py="x = 1", d__png="no", empty__txt=" \n")
    write(tmp_path / "sub", z__rst="Text\n====\n", old__TXT="capitals", h__html="<p>one")
    write(tmp_path / ".git", config__txt="hidden")
    write(tmp_path, __hidden__txt="hidden")
    found = list(read_documents(tmp_path))
    assert "other suffixes: 1 .png, 1 .html. To train" in caplog.text
    texts = ["# T\nx", "plain", "x = 1", "capitals", "Text\n====\n"]
    assert found == [{"text": text, "code": text == "x = 1"} for text in texts]
    assert list(read_documents(str(tmp_path / "a.md"))) == found[:1]


def test_files_that_are_not_text_are_left_out_of_a_folder(tmp_path, caplog):
    """Line ends become one kind, and a byte order mark goes."""
    marked = b"\xef\xbb\xbfone\r\ntwo\rthree"
    write(tmp_path, a__txt=marked, b__txt=b"\xff\xfea\0", c__txt=b"caf\xe9")
    assert [d["text"] for d in read_documents(tmp_path)] == ["one\ntwo\nthree"]
    assert "Left out 2 files of" in caplog.text
    assert "such as b.txt" in caplog.text
    with pytest.raises(DataError, match=r"c\.txt is not UTF-8"):
        list(read_documents(tmp_path / "c.txt"))


def test_nothing_to_read(tmp_path):
    write(tmp_path, a__png="x", c__jsonl="{}")
    for path in ("nowhere", tmp_path, tmp_path / "c.jsonl"):
        with pytest.raises(FileNotFoundError, match="neither a file of text"):
            list(read_documents(path))


PARTS = ["One", "two.", "Three", "e.g.", "U.S.", "3.5", "-", "x", "日本。語", "é!", "\n\n", "\t"]
texts = st.one_of(
    st.text(max_size=400),
    st.text("ab. \n-?!1A)\"'", max_size=300),
    st.lists(st.sampled_from(PARTS)).map(" ".join),
)


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 12), st.booleans())
def test_nothing_is_lost_or_too_long(text, max_words, code):
    chunks = chunk(text, max_words, code=code)
    assert "".join("".join(chunks).split()) == "".join(text.split())  # all but blanks, in order
    assert all(piece.strip() and len(piece.split()) <= max_words for piece in chunks)
    position = 0
    for piece in chunks:  # slices, with the blanks as they are
        position = text.index(piece, position) + len(piece)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 15))
def test_chunks_are_complete_sentences_as_many_as_fit(lengths, max_words):
    sentences = [
        " ".join(["Word", *["word"] * (n - 2), "end."]) if n > 1 else "End." for n in lengths
    ]
    expected: list[list[str]] = []
    for sentence in sentences:
        words = sentence.split()
        if expected and len(expected[-1]) + len(words) <= max_words:
            expected[-1] += words
        else:
            expected += [words[i : i + max_words] for i in range(0, len(words), max_words)]
    assert [piece.split() for piece in chunk(" ".join(sentences), max_words)] == expected


@pytest.mark.parametrize(
    "expected",
    [
        ["Dr. Smith and Mrs. Jones met Prof. Brown.", "They spoke."],
        ['She said "Go away!" and went.', "Then it rained."],
        ["It was 1990.", "The end came in room 12.", "Then silence."],
        ["Call os.Path.join, e.g. in Python 3.10.", "It ends."],
        ["**Bold.** Then it goes on.", "It ends."],
        ["J.\u00a0R.\u2028R. Tolkien wrote it.", "We read it."],
    ],
)
def test_where_sentences_end(expected):
    text = " ".join(expected)
    assert [text[a:b] for a, b in sentences(text, (0, len(text)))] == expected


def test_paragraphs_and_items_end_sentences():
    text = "no stop here\n\nnew paragraph\n- first item\n- second item\n2) third item\n# Heading"
    items = ["- first item", "- second item", "2) third item", "# Heading"]
    assert chunk(text, 3) == ["no stop here", "new paragraph", *items]
    assert chunk("One. Then it ends.\n\nlower.", 4) == ["One. Then it ends.", "lower."]


def test_a_long_sentence_is_cut_at_lines_then_at_words():
    text = "Short one. A a a a\nb b b b b b b\nc cc. End now."
    assert chunk(text, 5) == ["Short one.", "A a a a", "b b b b b", "b b\nc cc.", "End now."]


def test_text_without_spaces_is_counted_by_its_signs():
    text = "猫はかわいい。犬もかわいい。" * 3
    assert chunk(text, 7) == ["猫はかわいい。", "犬もかわいい。"] * 3
    assert chunk("漢字" * 5, 4) == ["漢字漢字", "漢字漢字", "漢字"]


def test_code_is_cut_at_the_margin_before_blank_lines():
    f, g = "def f():\n    a = 1\n\n    return a", "def g():\n    return 2"
    assert chunk(f"{f}\n\n\n{g}\n", 10, code=True) == [f, g]
    assert chunk(f"x = 1\n\n{f}\n\n\n{g}\n", 8, code=True)[:2] == ["x = 1", f]
    assert chunk(f"{f}\n\n\n{g}\n", 5, code=True) == [*f.split("\n\n"), g]


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ImportError, match=r'sentencex.*pip install "\.\[table\]"'):
        chunk("One. Two.")
    assert chunk("x = 1", code=True) == ["x = 1"]
