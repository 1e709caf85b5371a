"""Raw text to chunks, documents, groups, batches and a retrieval task: chunking, documents, data and titles."""

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from _tiny import tokenizer as tiny_tokenizer
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import BoW, StaticEmbedding
from torch import nn
from torch.utils.data import DataLoader

from st_magnitude.corpus.beir import DataError, RetrievalData, load_beir, save_beir
from st_magnitude.corpus.chunking import sentences
from st_magnitude.revela import (
    Document,
    GroupCollator,
    Section,
    build_groups,
    chunk,
    looks_like_code,
    read_documents,
    split_documents,
    title_task,
)
from st_magnitude.revela.groups import _first_half, split_batch

CODE = '''import os


def size(path):
    """Bytes of a file."""
    if not os.path.exists(path):

        return 0
    return os.stat(path).st_size


class Walker:
    def walk(self, top):
        for entry in os.scandir(top):
            yield entry.path
'''


def fold(text: str) -> str:
    return " ".join(text.split()).casefold()


def document(name: str, number: int, words: int = 6) -> str:
    """So many chunks of one sentence each, when ``max_words`` is the number of words."""
    return " ".join(f"{name.title()} says {'very ' * (words - 4)}much {i}." for i in range(number))


def chunks_of(name: str, number: int) -> list[str]:
    return chunk(document(name, number), 6, code=False)


def bare_words(text: str) -> str:
    return "".join(text.split())


# ---------------------------------------------------------------------------------------------------------------- chunk

texts = st.one_of(
    st.text(max_size=400),
    st.text("ab. \n-?!1A)\"'", max_size=300),
    st.lists(
        st.sampled_from(["One", "two.", "Three", "e.g.", "U.S.", "3.5", "\n\n", "- x", "日本。語", "é!", "\t", "Dr."])
    ).map(" ".join),
)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 12), st.sampled_from([True, False, None]))
def test_nothing_is_lost_or_too_long(text, max_words, code):
    chunks = chunk(text, max_words, code=code)
    assert bare_words("".join(chunks)) == bare_words(text)  # every character but blanks, in order
    assert all(piece.strip() and len(piece.split()) <= max_words for piece in chunks)
    position = 0
    for piece in chunks:  # slices, with the blanks as they are
        position = text.index(piece, position) + len(piece)


@settings(max_examples=200, deadline=None)
@given(st.text("ab. \n-?!1A)\"'é\u00a0\x1c\u2028", max_size=300), st.integers(1, 12), st.booleans())
def test_words_stay_whole(text, max_words, code):
    assert [word for piece in chunk(text, max_words, code=code) for word in piece.split()] == text.split()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 15))
def test_chunks_are_complete_sentences_as_many_as_fit(lengths, max_words):
    sentences = [" ".join(["Word", *["word"] * (n - 2), "end."]) if n > 1 else "End." for n in lengths]
    expected: list[list[str]] = []
    for sentence in sentences:
        words = sentence.split()
        if expected and len(expected[-1]) + len(words) <= max_words:
            expected[-1] += words
        else:
            expected += [words[i : i + max_words] for i in range(0, len(words), max_words)]
    assert [piece.split() for piece in chunk(" ".join(sentences), max_words, code=False)] == expected


@pytest.mark.parametrize(
    "expected",
    [
        ["Dr. Smith and Mrs. Jones met Prof. Brown.", "They spoke."],
        ["It weighs 3.5 kg, i.e. A lot.", "It fell."],
        ["See Fig. 3 and Eq. 4 of Vol. 2.", "It is there."],
        ["J. R. R. Tolkien wrote it.", "We read it."],
        ["The U.S. Army came in Jan. 1990.", "It left."],
        ["They live in the U.S.", "They like it."],
        ["He is No. 5 in the list.", "I said no.", "No.", "I did."],
        ['She said "Go away!" and went.', "Then it rained."],
        ["Really?!", "Yes... and no.", "Well."],
        ["He asked (in vain.)", "Nobody came."],
        ["It took 10 ms.", "Then it stopped."],
        ["It was 1990.", "The end came in room 12.", "Then silence."],
        ["1. Introduction is short.", "It ends."],
        ["Smith et al. Found it.", "It is so."],
        ["He is taller than I.", "We all know."],
    ],
)
def test_where_sentences_end(expected):
    text = " ".join(expected)
    assert [text[a:b] for a, b in sentences(text, (0, len(text)))] == expected


def test_paragraphs_and_items_end_sentences():
    text = "no stop here\n\nnew paragraph\n- first item\n- second item\n2) third item\n# Heading"
    assert chunk(text, 3, code=False) == [
        "no stop here",
        "new paragraph",
        "- first item",
        "- second item",
        "2) third item",
        "# Heading",
    ]
    assert chunk("One. Then it ends.\n\nlower.", 4, code=False) == ["One. Then it ends.", "lower."]


def test_a_long_sentence_is_cut_at_lines_then_at_words():
    text = "Short one. A a a a\nb b b b b b b\nc c. End now."
    assert chunk(text, 5, code=False) == ["Short one.", "A a a a", "b b b b b", "b b\nc c.", "End now."]


def test_text_without_spaces_is_counted_by_its_signs():
    text = "猫はかわいい。犬もかわいい。" * 3
    assert chunk(text, 7) == ["猫はかわいい。", "犬もかわいい。"] * 3
    assert chunk("漢字" * 5, 4) == ["漢字漢字", "漢字漢字", "漢字"]


def test_code_keeps_its_lines_and_indentation():
    chunks = chunk(CODE, 14)
    assert "\n".join(chunks).split("\n") == [line for line in CODE.split("\n") if line] or len(chunks) > 1
    assert [line for piece in chunks for line in piece.split("\n") if line] == [
        line for line in CODE.split("\n") if line
    ]
    assert chunks[-1] == CODE[CODE.index("class") :].rstrip()
    assert any(piece.startswith("    ") for piece in chunk(CODE, 5))  # a chunk that starts inside of a block


def test_code_is_cut_at_the_margin_before_blank_lines():
    code = "def f():\n    a = 1\n\n    return a\n\n\ndef g():\n    return 2\n"
    assert chunk(code, 10, code=True) == ["def f():\n    a = 1\n\n    return a", "def g():\n    return 2"]
    assert chunk(f"x = 1\n\n{code}", 8, code=True)[:2] == ["x = 1", "def f():\n    a = 1\n\n    return a"]
    assert chunk(code, 5, code=True) == ["def f():\n    a = 1", "    return a", "def g():\n    return 2"]


def test_max_words_is_checked():
    with pytest.raises(ValueError, match="max_words must be at least 1, got 0"):
        chunk("text", 0)


@pytest.mark.parametrize("blank", ["", "  \n\t \n", "\n \n- "[:3]])
def test_a_blank_text_has_no_chunks(blank):
    assert chunk(blank) == []


# ------------------------------------------------------------------------------------------------------ looks_like_code


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        '#include <stdio.h>\n\nint main(void) {\n    printf("hi\\n");\n    return 0;\n}\n',
        "const f = (x) => {\n  return x + 1\n}\nexport default f;\n",
        "SELECT name, age\nFROM people\nWHERE age > 30\nORDER BY age;",
        "#!/bin/sh\nif [ -f x ]; then\n  rm x\nfi\nPATH=/bin\n",
        "@cache\ndef f(x: int) -> int:\n    # it doubles the number that it is given\n    return 2 * x\n",
    ],
)
def test_code_is_recognised(text):
    assert looks_like_code(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Import duties rise. If so, we return; the others wait for news.",
        "The function is called as follows.\n\n    f(1)\n\nIt returns two, which is the\nnumber of its arguments.",
        "# Heading\n\n- one item of the list\n- another item of the list\n\nFor now, this is all.",
        "class is over.\nwhile it rained, we read.\nfrom here you can see the sea",
        "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.",
    ],
)
def test_prose_is_recognised(text):
    assert not looks_like_code(text)


def test_the_ending_decides():
    assert looks_like_code("plain words only", "src/Main.JAVA")
    assert looks_like_code("plain words", "a.py.gz")
    assert looks_like_code(CODE, "snippet.txt")
    assert not looks_like_code("plain words only", "x.md")
    assert Document("plain words", "a.py").is_code
    assert not Document(CODE, "a.py", code=False).is_code


def test_this_module_is_code_and_its_docs_are_not():
    root = Path(__file__).parents[2]
    modules = [path for path in (root / "st_magnitude").rglob("*.py") if path.stat().st_size >= 500]
    taken_for_prose = [path.name for path in modules if not looks_like_code(path.read_text(encoding="utf-8"))]
    assert len(taken_for_prose) <= 0.05 * len(modules), taken_for_prose  # such as one that is nearly all docstrings
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    taken_for_code = [page.name for page in pages if looks_like_code(page.read_text(encoding="utf-8"))]
    assert len(taken_for_code) <= 0.15 * len(pages), taken_for_code  # such as those that are nearly all recipes


# ------------------------------------------------------------------------------------------------------- read_documents


def write(folder: Path, **files: str | bytes) -> Path:
    """Files by name, ``__`` for a dot."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder(tmp_path):
    write(tmp_path, b__txt="plain", a__md="# T\nx", c__py="x = 1", d__png="no", empty__txt=" \n")
    write(tmp_path / "sub", z__rst="text", h__html="<p>one<p>two", old__txt__gz=gzip.compress(b"zipped"))
    write(tmp_path / ".git", config__txt="hidden")
    write(tmp_path, __hidden__txt="hidden")
    found = list(read_documents(tmp_path))
    assert [(d.name, d.text) for d in found] == [
        ("a.md", "# T\nx"),
        ("b.txt", "plain"),
        ("c.py", "x = 1"),
        ("sub/h.html", "one\n\ntwo"),
        ("sub/old.txt.gz", "zipped"),
        ("sub/z.rst", "text"),
    ]
    assert [d.is_code for d in found] == [False, False, True, False, False, False]
    assert [d.name for d in read_documents(str(tmp_path / "a.md"))] == ["a.md"]


def test_what_cannot_be_read_is_counted(tmp_path):
    write(tmp_path, a__txt="fine", b__txt=b"\xff\xfea\0", c__txt=b"caf\xe9", d__txt=b"a\0b", e__txt__gz=b"no gzip")
    with pytest.warns(
        UserWarning, match=r"Left out 4 files of .*: 1 UTF-16, 1 binary, 1 not UTF-8, 1 unreadable \(Bad"
    ):
        assert [d.text for d in read_documents(tmp_path)] == ["fine"]
    with pytest.raises(DataError, match=r"c\.txt is not UTF-8: convert it"):
        list(read_documents(tmp_path / "c.txt"))


def test_line_ends_and_byte_order_mark(tmp_path):
    write(tmp_path, a__txt=b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert [d.text for d in read_documents(tmp_path)] == ["one\ntwo\nthree"]


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder 'nowhere'.*in a list"):
        read_documents("nowhere")
    write(tmp_path, a__png="x", b__png="y", c="z")
    with pytest.raises(DataError, match=r"nothing to read in .*2 \.png, 1 without"):
        read_documents(tmp_path)


def test_jsonl(tmp_path):
    rows = [
        {"text": "one", "title": "T", "id": 7, "extra": [1]},
        {"text": "two"},
        {"text": " "},
        {"text": "x", "title": None},
    ]
    lines = "\n".join(map(json.dumps, rows)).replace("\n", "\n\n")
    write(tmp_path, a__jsonl="\ufeff" + lines, b__jsonl__gz=gzip.compress(b'{"text": "three"}\n'))
    assert list(read_documents(tmp_path)) == [
        Document("one", "7", "T"),
        Document("two", "a.jsonl:3"),
        Document("x", "a.jsonl:7"),
        Document("three", "b.jsonl.gz:1"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"line 3: is broken JSON .*column \d+\)\. Write one object a line"),
        (b'["text"]', r"line 3: is list, not an object\. Write"),
        (b'{"contents": "x"}', r"line 3: has no 'text'; it has \['contents'\]\. Rename"),
        (b'{"text": 3}', r"line 3: has a text that is int, not a string; quote"),
        (b'{"text": null}', r"line 3: has a text that is NoneType"),
        (b'{"text": "x", "title": 3}', r"line 3: has a title that is int"),
        (b'{"text": "caf\xe9"}', r"line 3: is not UTF-8; save"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
    write(tmp_path, a__jsonl=b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl, " + message):
        list(read_documents(tmp_path))


def test_markdown_sections(tmp_path):
    text = """---
title: front matter
---
Before.

# The *first* [title](x.html) {#anchor}
One.

```sh
# no heading
```

## Sub `code` ##
Two.
#nor this

Setext title
============
Three.

Another
---
Four.

a paragraph of
two lines
---
- item
---
"""
    [found] = read_documents(write(tmp_path, a__md=text))
    assert [(s.level, s.title) for s in found.sections] == [
        (1, ""),
        (1, "The first title"),
        (2, "Sub code"),
        (1, "Setext title"),
        (2, "Another"),
    ]
    assert [s.text for s in found.sections[:4]] == [
        "Before.",
        "One.\n\n```sh\n# no heading\n```",
        "Two.\n#nor this",
        "Three.",
    ]
    assert found.title == "The first title"
    assert "front matter" not in found.text
    assert "# no heading" in found.text


def test_rst_sections(tmp_path):
    text = """.. _label:

========
 Manual
========

Before.

.. _part-one:

Part :mod:`!one` --- start
--------------------------
One.

=====  =====
a      b
=====  =====

Deeper
~~~~~~
    Indented::

        x = 1

Too long for its line
-----
Part two
--------
no blank line before: a paragraph

Part three
----------
Three.
"""
    [found] = read_documents(write(tmp_path, a__rst=text))
    assert [(s.level, s.title) for s in found.sections] == [
        (1, "Manual"),
        (2, "Part one --- start"),
        (3, "Deeper"),
        (2, "Part three"),
    ]
    assert found.sections[0].text == "Before."
    assert found.sections[3].text == "Three."
    assert found.sections[2].text.startswith("    Indented::\n\n        x = 1")
    assert found.title == "Manual"
    assert "part-one" not in found.text


def test_html_sections(tmp_path):
    text = """<!DOCTYPE html><html><head><title>Page &amp; more</title><style>p {}</style>
<script>if (a < b) {}</script></head>
<body><header><p>menu</p></header><nav>skip <nav>inner</nav> me</nav><div role="navigation"><div>no</div> no</div>
<p>Before
   it.<h2>First<a class="headerlink" href="#x">¶</a></h2><p>One <b>bold</b>&nbsp;word<br>new line</p>
<pre>def f():
    return  1
</pre><h3><code>sub</code> title</h3><ul><li>a<li>b</ul><table><tr><td>c</td><td>d</td></tr></table>
<p hidden>unseen</p><footer>contact</footer></body></html>"""
    [found] = read_documents(write(tmp_path, a__html=text))
    assert found.sections == (
        Section("", "Before it."),
        Section("First", "One bold word\nnew line\n\ndef f():\n    return  1", 1),
        Section("sub title", "a\n\nb\n\nc d", 2),
    )
    assert found.title == "First"
    assert found.text == "\n\n".join(
        ["Before it.", "First", found.sections[1].text, "sub title", found.sections[2].text]
    )
    [untitled] = read_documents(write(tmp_path / "x", b__html="<title>Only this</title><p>text"))
    assert (untitled.title, untitled.text, untitled.sections) == ("Only this", "text", ())


@pytest.mark.parametrize("section", ["<![if !supportLists]>", "<![endif]>", "<![1>", "<![a:>", "<![CDATA[x]]>", "<![>"])
def test_marked_sections_are_comments(tmp_path, section):
    [found] = read_documents(write(tmp_path, a__html=f"<p>before {section}after</p><p>end</p>"))
    assert found.text == "before after\n\nend"


@settings(max_examples=200, deadline=None)
@example("<![a:")
@example("<![1")
@given(st.text("<>/=!-&;#ph1navdiv `~*_.:[]()\n", max_size=200))
def test_any_mark_up_can_be_read(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("a.md", "a.rst", "a.html"):
        (folder / name).write_text(text, encoding="utf-8")
        for found in read_documents(folder / name):
            if not name.endswith("html"):  # all text is in some section, but titles and front matter
                kept = " ".join(s.text for s in found.sections) or found.text
                assert not Counter(kept.split()) - Counter(found.text.split())
        (folder / name).unlink()


# --------------------------------------------------------------------------------------------------------- build_groups

OPTIONS = {"max_words": 6, "min_words": 1, "progress": False}


def test_the_order_of_the_paper():
    a, b, c, d, e = (chunks_of(name, n) for name, n in zip("abcde", (3, 5, 2, 1, 2), strict=True))
    groups = build_groups(
        [document(n, k) for n, k in zip("abcde", (3, 5, 2, 1, 2), strict=True)], group_size=4, **OPTIONS
    )
    assert groups.column_names == ["chunks", "code"]
    order = [a[0], b[0], a[1], b[1], a[2], b[2], b[3], b[4], c[0], d[0], c[1], e[0], e[1]]
    assert [row["chunks"] for row in groups] == [order[0:4], order[4:8], order[8:12]]  # e[1] alone is no group
    five = build_groups([document("a", 3), document("b", 3)], group_size=4, **OPTIONS)
    assert [len(row["chunks"]) for row in five] == [4, 2]


@pytest.mark.parametrize("interleave", [1, 2, 3, 7])
def test_any_number_of_documents_alternates(interleave):
    sizes = [3, 1, 4, 1, 5, 2]
    groups = build_groups(
        [document(f"n{i}", n) for i, n in enumerate(sizes)], group_size=16, interleave=interleave, **OPTIONS
    )
    order = []
    for start in range(0, len(sizes), interleave):
        window = list(enumerate(sizes))[start : start + interleave]
        for j in range(max(sizes)):
            order += [chunks_of(f"n{i}", n)[j] for i, n in window if j < n]
    assert groups[0]["chunks"] == order == [c for row in groups for c in row["chunks"]]


SENTENCES = st.lists(st.sampled_from([f"{w} is here." for w in "Abcdefgh"]), min_size=0, max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(SENTENCES, min_size=1, max_size=6), st.integers(2, 5), st.integers(1, 3))
def test_no_duplicates_in_a_group(documents, group_size, interleave):
    texts = [" ".join(s if i % 2 else s.upper().replace(" ", "  ") for i, s in enumerate(d)) for d in documents]
    options = {"max_words": 3, "min_words": 1, "progress": False, "group_size": group_size, "interleave": interleave}
    given_chunks = Counter(fold(s) for d in documents for s in d)
    if len(given_chunks) < 2:
        with pytest.raises(DataError):
            build_groups(texts, **options)
        return
    rows = [[fold(c) for c in row["chunks"]] for row in build_groups(texts, **options)]
    assert all(len(set(row)) == len(row) for row in rows)
    for i, row in enumerate(rows):  # a short group means that nothing else is left for it
        assert len(row) == group_size or not {c for later in rows[i + 1 :] for c in later} - set(row)
    assert all(2 <= len(row) <= group_size for row in rows)
    lost = given_chunks - Counter(c for row in rows for c in row)
    assert not Counter(c for row in rows for c in row) - given_chunks
    assert len(lost) <= 1  # copies of one text at the most: two different ones would be a group
    streamed = build_groups(texts, streaming=True, **options)
    assert [[fold(c) for c in row["chunks"]] for row in streamed] == rows


def test_a_duplicate_waits_for_the_next_group():
    texts = ["Same words here. Alpha one one.", "same  WORDS here. Beta two two. Gamma three three. Delta four four."]
    groups = build_groups(texts, group_size=3, max_words=3, min_words=1, progress=False)
    assert [row["chunks"] for row in groups] == [
        ["Same words here.", "Alpha one one.", "Beta two two."],
        ["same  WORDS here.", "Gamma three three.", "Delta four four."],
    ]


def test_code_is_decided_for_each_document():
    groups = build_groups([CODE, document("prose", 3)], group_size=2, max_words=14, min_words=1, progress=False)
    flags = {text: flag for row in groups for text, flag in zip(row["chunks"], row["code"], strict=True)}
    assert flags
    assert all(flag == (text in chunk(CODE, 14)) for text, flag in flags.items())
    assert set(flags.values()) == {True, False}
    [row] = build_groups([{"text": document("prose", 3), "code": True}], **OPTIONS)
    assert row["code"] == [True] * 3


def test_every_source_gives_the_same_groups(tmp_path):
    texts = [document("a", 3), document("b", 4), document("c", 2)]
    write(tmp_path / "folder", **{f"{i}__txt": text for i, text in enumerate(texts)})
    write(tmp_path, rows__jsonl="\n".join(json.dumps({"text": text}) for text in texts))
    sources = {
        "generator": (text for text in texts),
        "documents": [Document(text) for text in texts],
        "mappings": [{"text": text, "other": 1} for text in texts],
        "dataset": Dataset.from_dict({"id": [1, 2, 3], "text": texts, "image": [b"x"] * 3}),
        "iterable": IterableDataset.from_generator(lambda: ({"text": text} for text in texts)),
        "folder": tmp_path / "folder",
        "file": str(tmp_path / "rows.jsonl"),
    }
    expected = build_groups(texts, group_size=4, **OPTIONS).to_list()
    for name, source in sources.items():
        if name != "generator":
            streamed = build_groups(source, group_size=4, streaming=True, **OPTIONS)
            assert list(streamed) == list(streamed) == expected, name  # and once more: it can be restarted
        assert build_groups(source, group_size=4, **OPTIONS).to_list() == expected, name


def test_min_words():
    text = "One two three four five. Six."
    [row] = build_groups([text, "Seven eight nine ten eleven."], max_words=5, progress=False)
    assert row["chunks"] == ["One two three four five.", "Seven eight nine ten eleven."]
    with pytest.warns(UserWarning, match="3 of 5 chunks have fewer than 5 words"):
        build_groups([text, "Seven eight nine ten eleven.", "A.", "B."], max_words=5, progress=False)
    with pytest.raises(DataError, match="None of the 2 chunks has 5 words: lower min_words"):
        build_groups(["One.", "Two."], progress=False)


def test_shuffling():
    texts = [document(f"n{i}", 4) for i in range(8)]
    plain, shuffled, again, other = (
        build_groups(texts, group_size=4, **OPTIONS, **options).to_list()
        for options in (
            {},
            {"shuffle_documents": True},
            {"shuffle_documents": True},
            {"shuffle_documents": True, "seed": 1},
        )
    )
    assert shuffled == again
    assert len({json.dumps(rows) for rows in (plain, shuffled, other)}) == 3

    def topics(rows):
        return [len({c.split()[0] for c in row["chunks"]}) for row in rows]

    assert set(topics(plain)) == set(topics(shuffled)) == {2}
    mixed = build_groups(texts, group_size=4, shuffle_chunks=True, **OPTIONS).to_list()
    assert max(topics(mixed)) > 2
    assert sorted(c for row in mixed for c in row["chunks"]) == sorted(c for row in plain for c in row["chunks"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"max_words": 0}, "max_words must be at least 1, got 0"),
        ({"interleave": 0}, "interleave must be at least 1, got 0"),
        ({"min_words": 0}, "min_words must be at least 1, got 0"),
        ({"min_words": 9, "max_words": 8}, r"min_words is 9, above max_words \(8\)"),
        ({"streaming": True, "shuffle_chunks": True}, "Shuffling needs all documents in memory.*streaming=False"),
        ({"streaming": True, "shuffle_documents": True}, "Shuffling needs all documents in memory"),
        ({"num_shards": 2}, "num_shards=2 is for streaming=True"),
        ({"num_shards": 3, "streaming": True}, "num_shards=3, but there are 2 documents or files: lower it"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        build_groups(["Some text.", "Another text."], **options)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "There are no documents: pass at least one"),
        (["", " \n"], "All of the 2 texts are empty"),
        (["One two three four five six."], "at least 2 different chunks.*pass more text"),
        (["One two three four five six."] * 3, "at least 2 different chunks"),
        ([3], r"documents\[0\] is int: pass strings"),
        ([{"body": "x"}], r"documents\[0\] has no 'text'; it has \['body'\]"),
        ([{"chunks": ["a", "b"]}], "groups already"),
        ({"text": "x"}, "one mapping: pass a list"),
        (7, "documents is int: pass a path"),
        ("no such folder", r"no file or folder 'no such folder'.*\[text\]"),
        (Dataset.from_dict({"body": ["x"]}), r"no 'text': rename .*rename_column\('body', 'text'\)"),
        (Dataset.from_dict({"chunks": [["x", "y"]]}), "groups already"),
        (DatasetDict(train=Dataset.from_dict({"text": ["x"]})), r"has the splits \['train'\]: pass one"),
    ],
)
def test_documents_are_checked(documents, message, streaming):
    with pytest.raises(DataError, match=message):
        list(build_groups(documents, streaming=streaming, progress=False))


def test_a_generator_cannot_be_streamed():
    with pytest.raises(DataError, match="A generator is used up after one epoch: for streaming, pass a path, a list"):
        build_groups((text for text in ["a", "b"]), streaming=True)


@pytest.mark.parametrize("kind", ["list", "dataset", "folder"])
def test_shards_are_grouped_on_their_own(tmp_path, kind):
    texts = [document(f"n{i}", 5) for i in range(5)]
    write(tmp_path, **{f"{i}__txt": text for i, text in enumerate(texts)})
    source = {"list": texts, "dataset": Dataset.from_dict({"text": texts}), "folder": tmp_path}[kind]
    streamed = build_groups(source, group_size=4, streaming=True, num_shards=2, **OPTIONS)
    assert streamed.num_shards == 2
    cut = 2 if kind != "dataset" else 3
    parts = [build_groups(part, group_size=4, **OPTIONS).to_list() for part in (texts[:cut], texts[cut:])]
    assert list(streamed) == parts[0] + parts[1]
    loaded = list(DataLoader(streamed, batch_size=None, num_workers=2))
    assert sorted(map(json.dumps, loaded)) == sorted(map(json.dumps, parts[0] + parts[1]))


def test_streaming_reads_no_more_than_it_needs():
    read = []

    class Endless:
        def __iter__(self):
            for i in range(10**9):
                read.append(i)
                yield document(f"n{i}", 4)

    rows = iter(build_groups(Endless(), group_size=4, streaming=True, **OPTIONS))
    assert len([next(rows) for _ in range(5)]) == 5
    assert len(read) < 30


# -------------------------------------------------------------------------------------------------------- GroupCollator

ROWS = [
    {"chunks": ["open a file for reading", "what is rain"], "code": [False, True]},
    {
        "chunks": ["the sky is\n blue", "lima", "sort the list of all words that it has"],
        "code": [False] * 3,
        "extra": 1,
    },
]
FLAT = [text for row in ROWS for text in row["chunks"]]
HALVES = ["open a file", "what is rain", "the sky", "lima", "sort the list of all"]


@pytest.fixture
def lm_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    return tokenizer


def split(batch):
    features, labels = SentenceTransformerTrainer.collect_features(None, batch)
    assert labels is None
    return features


@pytest.mark.parametrize("query_part", ["half", "full"])
def test_three_sets_of_features(model, lm_tokenizer, query_part):
    collator = GroupCollator(model.preprocess, lm_tokenizer, query_part=query_part)
    batch = collator(ROWS)
    query, passage, lm = split(batch)
    for ours, theirs in zip(split_batch(batch), (query, passage, lm), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[key] is theirs[key] for key in ours)
    for found, prefix, texts in (
        (query, "Query: ", HALVES if query_part == "half" else FLAT),
        (passage, "Passage: ", FLAT),
    ):
        expected = model.preprocess([prefix + text for text in texts])
        assert found.keys() >= {"input_ids", "attention_mask"}
        for key in ("input_ids", "attention_mask"):
            assert torch.equal(found[key], expected[key])
        assert model(found)["sentence_embedding"].shape == (5, 32)
    assert set(lm) == {"input_ids", "attention_mask", "group"}
    assert lm["group"].tolist() == [0, 0, 1, 1, 1]
    assert lm["group"].dtype == torch.int64
    for i, text in enumerate(FLAT):
        ids = lm_tokenizer(text)["input_ids"]
        assert lm["input_ids"][i].tolist() == ids + [lm_tokenizer.pad_token_id] * (lm["input_ids"].shape[1] - len(ids))
        assert lm["attention_mask"][i].tolist() == [1] * len(ids) + [0] * (lm["input_ids"].shape[1] - len(ids))


def test_without_the_code_column_all_is_prose(model, lm_tokenizer):
    collator = GroupCollator(model.preprocess, lm_tokenizer)
    plain = collator([{"chunks": row["chunks"]} for row in ROWS])
    prose = collator.texts_to_batch([row["chunks"] for row in ROWS], [[False] * 2, [False] * 3])
    none = collator.texts_to_batch([row["chunks"] for row in ROWS])
    assert plain.keys() == prose.keys() == none.keys()
    for key, value in prose.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, plain[key])
            assert torch.equal(value, none[key])
    assert not torch.equal(prose["query_input_ids"], collator(ROWS)["query_input_ids"])


def test_lengths(model, lm_tokenizer):
    batch = GroupCollator(model.preprocess, lm_tokenizer, max_length=5, prefixes=("a: ", "b: "))(ROWS)
    assert {batch[f"{name}_input_ids"].shape for name in ("query", "passage", "lm")} == {(5, 5)}
    assert (
        batch["lm_input_ids"][4].tolist() == lm_tokenizer("sort the list of all")["input_ids"]
    )  # the beginning is kept


def test_the_tokenizer_stays_as_it_is(model, lm_tokenizer):
    lm_tokenizer.pad_token = None
    lm_tokenizer.eos_token = "[SEP]"
    batch = GroupCollator(model.preprocess, lm_tokenizer)(ROWS)
    assert (lm_tokenizer.padding_side, lm_tokenizer.truncation_side, lm_tokenizer.pad_token) == ("left", "left", None)
    assert batch["lm_input_ids"][3, -1] == lm_tokenizer.eos_token_id
    assert batch["lm_attention_mask"][3, -1] == 0
    lm_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad nor an eos token: set"):
        GroupCollator(model.preprocess, lm_tokenizer)


@pytest.mark.parametrize("kind", ["static", "bow"])
def test_models_without_attention_masks(lm_tokenizer, kind):
    module = StaticEmbedding(tiny_tokenizer(), embedding_dim=8) if kind == "static" else BoW(["open", "file", "lima"])
    model = SentenceTransformer(modules=[module], device="cpu")
    query, passage, lm = split(GroupCollator(model.preprocess, lm_tokenizer)(ROWS))
    assert torch.equal(lm["group"], torch.tensor([0, 0, 1, 1, 1]))
    expected = model.encode(["Passage: " + text for text in FLAT], convert_to_tensor=True)
    assert torch.allclose(model(passage)["sentence_embedding"], expected)
    assert model(query)["sentence_embedding"].shape == expected.shape


def test_a_preprocess_that_knows_no_length(model, lm_tokenizer):
    def preprocess(inputs, prompt=None):
        return model.preprocess(inputs, prompt=prompt)

    expected, found = (GroupCollator(f, lm_tokenizer)(ROWS) for f in (model.preprocess, preprocess))
    assert torch.equal(found["query_input_ids"], expected["query_input_ids"])


@pytest.mark.parametrize(
    "row",
    [{"text": "a chunk"}, {"chunks": "a chunk"}, {"chunks": ["a chunk"]}, {"chunks": ["a", 3]}, {"chunks": None}],
)
def test_one_row_must_be_one_group(model, lm_tokenizer, row):
    with pytest.raises(DataError, match=r"Row 1 of the batch has .*One row must be one group.*build_groups"):
        GroupCollator(model.preprocess, lm_tokenizer)([ROWS[0], row])


def test_collator_arguments_are_checked(model, lm_tokenizer):
    for options, message in (
        ({"query_part": "first"}, "query_part must be 'half' or 'full', got 'first'"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"prefixes": "Query: "}, "prefixes must be two strings"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupCollator(model.preprocess, lm_tokenizer, **options)
    with pytest.raises(DataError, match=r"code has \[1\] values a group, chunks \[2\]"):
        GroupCollator(model.preprocess, lm_tokenizer).texts_to_batch([["a", "b"]], [[True]])


@settings(max_examples=100, deadline=None)
@given(st.text("ab \n\t日é.", max_size=60))
def test_the_first_half(text):
    half = _first_half(text)
    assert text.startswith(half)
    if "日" not in text and text.strip():
        words = text.split()
        assert half.split() == words[: (len(words) + 1) // 2]


class Recording(nn.Module):
    """A loss that keeps the language model's part of every batch that it sees."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.seen = []

    def forward(self, features, labels=None):
        query, passage, lm = features
        for number in lm["group"].unique():
            rows = lm["input_ids"][lm["group"] == number], lm["attention_mask"][lm["group"] == number]
            self.seen.append([ids[mask.bool()].tolist() for ids, mask in zip(*rows, strict=True)])
        return (self.model(query)["sentence_embedding"] - self.model(passage)["sentence_embedding"]).square().mean()


@pytest.mark.parametrize("streaming", [False, True])
def test_groups_survive_the_trainer(model, lm_tokenizer, tmp_path, streaming):
    sizes = random.Random(0).choices(range(2, 10), k=20)  # in letters, which are all that this tokenizer knows
    texts = [" ".join(f"Open {chr(97 + i)}{chr(97 + j)}." for j in range(n)) for i, n in enumerate(sizes)]
    options = {"group_size": 4, "max_words": 2, "min_words": 1, "progress": False}
    groups = build_groups(texts, **options)
    loss = Recording(model)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        max_steps=-(-len(groups) // 3) if streaming else -1,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=build_groups(texts, streaming=True, **options) if streaming else groups,
        loss=loss,
        data_collator=GroupCollator(model.preprocess, lm_tokenizer),
    )
    trainer.train()
    expected = [[lm_tokenizer(text)["input_ids"] for text in row["chunks"]] for row in groups]
    assert (loss.seen == expected) == streaming  # else shuffled,
    assert sorted(loss.seen) == sorted(expected)  # but row by row


# ------------------------------------------------------------------------------------------ split_documents, title_task


def test_the_split_is_by_text():
    texts = [f"Text number {i} of many." for i in range(300)]
    train, held_out = split_documents(texts, 0.2)
    assert [d.text for d in train] == [t for t in texts if t in {d.text for d in train}]
    assert sorted(d.text for d in train + held_out) == sorted(texts)
    assert 35 < len(held_out) < 85
    assert [d.text for d in split_documents(texts[::-1], 0.2)[1]] == [d.text for d in held_out][::-1]
    more = split_documents(texts + [f"Another one: {i}" for i in range(300)], 0.2)[1]
    assert {d.text for d in held_out} <= {d.text for d in more}  # new documents move no others
    assert {d.text for d in split_documents(texts, 0.2, seed=1)[1]} != {d.text for d in held_out}
    larger = {d.text for d in split_documents(texts, 0.4)[1]}
    assert {d.text for d in held_out} < larger


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=2), st.floats(0.01, 0.99), st.integers(0, 5))
def test_equal_texts_are_on_one_side(letters, share, seed):
    texts = [f"{letter}  Text" if i % 2 else f" {letter} text\n" for i, letter in enumerate(letters)]
    if len(set(letters)) < 2:
        with pytest.raises(DataError, match="1 different documents cannot be split"):
            split_documents(texts, share, seed)
        return
    train, held_out = ({fold(d.text) for d in part} for part in split_documents(texts, share, seed))
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_the_share_is_checked(share):
    with pytest.raises(ValueError, match="held_out must lie between 0 and 1"):
        split_documents(["a", "b"], share)


PAGES = {
    "tea.md": "# Tea\nIt is a drink.\n\n## 1.2 Green tea\nUse 80 degrees. Wait two minutes.\n\n"
    "### Storing\nKeep it dry.\n\n"
    "## See also\nCoffee.\n\n## Empty\n\n## Notice\nAll rights reserved.\n",
    "bread.md": "# Bread\n\n## Storing\nIn a box.\n\n## Sourdough\nFeed the starter. Fold the dough.\n\n"
    "## Terms\nAll rights reserved.\n",
    "plain.txt": "Just a text. It has no title.",
}


def test_titles_ask_for_their_sections(tmp_path):
    write(tmp_path, **{name.replace(".", "__"): text for name, text in PAGES.items()})
    task = title_task(tmp_path, max_words=4)
    assert isinstance(task, RetrievalData)
    assert task.kind == "titles"
    assert not task.negatives
    found = {task.queries[q]: {task.corpus[d] for d in docs} for q, docs in task.relevant_docs.items()}
    assert found == {
        "Tea": {"It is a drink."},
        "Green tea": {"Use 80 degrees.", "Wait two minutes."},
        "Sourdough": {"Feed the starter.", "Fold the dough."},
    }  # "Storing" occurs twice, "See also" is generic, "Bread" and "Empty" have no text, the notice is on two pages
    assert sorted(task.corpus.values()) == sorted(
        [
            "It is a drink.",
            "Use 80 degrees.",
            "Wait two minutes.",
            "Keep it dry.",
            "Coffee.",
            "All rights reserved.",
            "In a box.",
            "Feed the starter.",
            "Fold the dough.",
            "Just a text.",
            "It has no title.",
        ]
    )
    assert not {"Green tea", "Tea", "Sourdough"} & {line for text in task.corpus.values() for line in text.split("\n")}
    save_beir(task, tmp_path / "beir")
    assert load_beir(tmp_path / "beir").corpus == task.corpus


def test_a_title_of_a_whole_document():
    task = title_task(
        [{"text": "Green tea\nUse 80 degrees.", "title": "Green tea"}, {"text": "Rye.", "title": "Bread"}]
    )
    assert task.queries == {"q0": "Green tea", "q1": "Bread"}
    assert list(task.corpus.values()) == ["Use 80 degrees.", "Rye."]


def test_a_sample_of_the_queries():
    documents = [Document(f"Text {i}.", f"d{i}", title=f"Title {'ab' * i}") for i in range(1, 20)]
    full, some, again, other = (
        title_task(documents, max_queries=n, seed=seed) for n, seed in ((None, 0), (5, 0), (5, 0), (5, 1))
    )
    assert len(full.queries) == 19
    assert len(some.queries) == 5 == len(some.relevant_docs)
    assert some == again
    assert some.queries != other.queries
    assert some.corpus == full.corpus
    assert set(some.queries.values()) <= set(full.queries.values())


def test_without_titles_first_sentences_ask():
    texts = ["Green tea wants cooler water. Use 80 degrees. Wait.", "Alone in its chunk it stands.", CODE]
    task = title_task(texts)
    assert task.kind == "sentences"
    assert task.queries == {"q0": "Green tea wants cooler water."}
    assert task.corpus[next(iter(task.relevant_docs["q0"]))] == "Use 80 degrees. Wait."
    assert len(task.corpus) == 3
    assert task.queries["q0"] not in " ".join(task.corpus.values())
    with pytest.raises(
        DataError, match="The 3 documents give no queries by titles: pass documents with section titles"
    ):
        title_task(texts, kind="titles")
    titled = [Document(texts[0], title="Green tea")]
    assert title_task(titled).kind == "titles"
    assert title_task(titled, kind="sentences").kind == "sentences"


def test_title_task_arguments_are_checked():
    with pytest.raises(ValueError, match="kind must be 'titles', 'sentences' or None, got 'best'"):
        title_task(["a"], kind="best")
    with pytest.raises(ValueError, match="max_queries must be at least 1"):
        title_task(["a"], max_queries=0)
    with pytest.raises(DataError, match="There are no documents, or all of them are empty"):
        title_task([" "])
    with pytest.raises(DataError, match="give no queries by titles or sentences"):
        title_task(["one"])


def test_a_name_that_repeats_keeps_its_chunks_apart():
    task = title_task(
        [Document("One here.", "same", title="First"), Document("Two here.", "same\tname", title="Second")]
    )
    assert sorted(task.corpus) == ["same name#0", "same#0"]
    task = title_task([Document("One here.", "same", title="First"), Document("Two here.", "same", title="Second")])
    assert sorted(task.corpus) == ["same#0", "same#1"]
    assert all(re.fullmatch(r"q\d+", q) for q in task.queries)
