"""Files to documents."""

import json

import pytest
from _texts import write

from st_magnitude.revela import read_documents


def test_a_folder(tmp_path):
    write(tmp_path, b__txt="plain", a__md="# T\nx", c__py="x = 1", d__png="no", empty__txt=" \n")
    write(tmp_path / "sub", z__rst="Text\n====\n", old__TXT="capitals", h__html="<p>one")
    write(tmp_path / ".git", config__txt="hidden")
    write(tmp_path, __hidden__txt="hidden")
    found = list(read_documents(tmp_path))
    texts = ["# T\nx", "plain", "x = 1", "capitals", "Text\n====\n"]
    assert found == [{"text": text, "code": text == "x = 1"} for text in texts]
    assert list(read_documents(str(tmp_path / "a.md"))) == found[:1]


def test_files_that_are_not_text_are_left_out_of_a_folder(tmp_path):
    write(tmp_path, a__txt="fine", b__txt=b"\xff\xfea\0", c__txt=b"caf\xe9", d__txt=b"a\0b")
    with pytest.warns(UserWarning, match=r"Left out 3 files of .* that are not UTF-8 text, such as b\.txt"):
        assert [d["text"] for d in read_documents(tmp_path)] == ["fine"]
    with pytest.raises(ValueError, match=r"c\.txt is not UTF-8 text .*; convert it"):
        list(read_documents(tmp_path / "c.txt"))


def test_line_ends_and_byte_order_mark(tmp_path):
    write(tmp_path, a__txt=b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert [d["text"] for d in read_documents(tmp_path)] == ["one\ntwo\nthree"]


def test_nothing_to_read(tmp_path):
    write(tmp_path, a__png="x", c="z")
    for path in ("nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder with .*in a list"):
            list(read_documents(path))


def test_jsonl(tmp_path):
    rows = [{"text": "one", "title": "T", "id": 7, "extra": [1]}, {"text": "two"}, {"text": " "}, {"text": "x"}]
    lines = "\n".join(map(json.dumps, rows)).replace("\n", "\n\n")
    write(tmp_path, a__jsonl="\ufeff" + lines, b__jsonl=b'{"text": "three", "code": true}\n')
    found = list(read_documents(tmp_path))
    assert [document["text"] for document in found] == ["one", "two", "x", "three"]
    assert [document["code"] for document in found] == [False, False, False, True]


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
