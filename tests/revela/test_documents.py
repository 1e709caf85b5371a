"""Files to documents and sections, and documents held out."""

import json
from collections import Counter

import pytest
from _texts import fold, write
from hypothesis import given, settings
from hypothesis import strategies as st

from st_magnitude.revela import Document, read_documents, split_documents


def test_a_folder(tmp_path):
    write(tmp_path, b__txt="plain", a__md="# T\nx", c__py="x = 1", d__png="no", empty__txt=" \n")
    write(tmp_path / "sub", z__rst="Text\n====\n", old__TXT="capitals", h__html="<p>one")
    write(tmp_path / ".git", config__txt="hidden")
    write(tmp_path, __hidden__txt="hidden")
    found = list(read_documents(tmp_path))
    assert [(d.name, d.text) for d in found] == [
        ("a.md", "# T\nx"),
        ("b.txt", "plain"),
        ("c.py", "x = 1"),
        ("sub/old.TXT", "capitals"),
        ("sub/z.rst", "Text\n====\n"),
    ]
    assert [d.code for d in found] == [False, False, True, False, False]
    assert [d.name for d in read_documents(str(tmp_path / "a.md"))] == ["a.md"]


def test_files_that_are_not_text_are_left_out_of_a_folder(tmp_path):
    write(tmp_path, a__txt="fine", b__txt=b"\xff\xfea\0", c__txt=b"caf\xe9", d__txt=b"a\0b")
    with pytest.warns(UserWarning, match=r"Left out 3 files of .* that are not UTF-8 text, such as b\.txt"):
        assert [d.text for d in read_documents(tmp_path)] == ["fine"]
    with pytest.raises(ValueError, match=r"c\.txt is not UTF-8 text .*; convert it"):
        list(read_documents(tmp_path / "c.txt"))


def test_line_ends_and_byte_order_mark(tmp_path):
    write(tmp_path, a__txt=b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert [d.text for d in read_documents(tmp_path)] == ["one\ntwo\nthree"]


def test_nothing_to_read(tmp_path):
    write(tmp_path, a__png="x", c="z")
    for path in ("nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder with .*in a list"):
            read_documents(path)


def test_jsonl(tmp_path):
    rows = [
        {"text": "one", "title": "T", "id": 7, "extra": [1]},
        {"text": "two"},
        {"text": " "},
        {"text": "x", "title": None},
    ]
    lines = "\n".join(map(json.dumps, rows)).replace("\n", "\n\n")
    write(tmp_path, a__jsonl="\ufeff" + lines, b__jsonl=b'{"text": "three"}\n')
    assert list(read_documents(tmp_path)) == [
        Document("one", "7", "T"),
        Document("two", "a.jsonl:3"),
        Document("x", "a.jsonl:7"),
        Document("three", "b.jsonl:1"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"line 3: is not valid JSON .*; write one object per line"),
        ('["text"]', r"line 3: needs a string under the key 'text', but is list"),
        ('{"contents": "x"}', r"line 3: needs a string under the key 'text', but is \['contents'\]"),
        ('{"text": 3}', r"line 3: needs a string"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
    write(tmp_path, a__jsonl=f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, " + message):
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
> # quoted
"""
    [found] = read_documents(write(tmp_path, a__md=text))
    assert [(s.level, s.title) for s in found.sections] == [
        (1, ""),
        (1, "The first title"),
        (2, "Sub code"),
        (1, "Setext title"),
        (2, "Another"),
        (2, "a paragraph of two lines"),
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


@settings(max_examples=200, deadline=None)
@given(st.text("<>/=!-&;#ph1navdiv `~*_.:[]()\n", max_size=200))
def test_any_markdown_can_be_read(tmp_path_factory, text):
    """All text is in some section, but titles and front matter."""
    path = tmp_path_factory.mktemp("fuzz") / "a.md"
    path.write_text(text, encoding="utf-8")
    for found in read_documents(path):
        kept = " ".join(s.text for s in found.sections) or found.text
        assert not Counter(kept.split()) - Counter(found.text.split())


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
        with pytest.raises(ValueError, match="1 different documents cannot be split"):
            split_documents(texts, share, seed)
        return
    train, held_out = ({fold(d.text) for d in part} for part in split_documents(texts, share, seed))
    assert train
    assert held_out
    assert not train & held_out


def test_the_share_is_checked():
    with pytest.raises(ValueError, match="held_out must be between 0 and 1"):
        split_documents(["a", "b"], 1)
