"""Damaged input: every reader returns what can be used, or says what is wrong and where."""

import os
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from st_magnitude.data.retrieval import DataError
from st_magnitude.workbench.files.pairs import load_splits

NASTY = [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x85", b"\x1c"]
NASTY += [b"\t", b"\r", b"\n", b'"', b"'", b"\\", b"{", b"}", b"NaN", b"-1e999", b"1_0", b"null"]
NASTY += [b" ", b"\\u0000", b"../../x", b"#"]
# the same 50 every time, unless so many others are asked for
EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
fuzz = settings(
    deadline=None,
    derandomize=EXAMPLES is None,
    max_examples=int(EXAMPLES or 50),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, nasty: Sequence[bytes] = ()) -> bytes:
    """A few places of it cut out, and others put in."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(whole)))
        end = draw(st.integers(start, min(start + 40, len(whole))))
        put_in = draw(st.sampled_from([*NASTY, *nasty]) | st.binary(max_size=8))
        whole = whole[:start] + put_in + whole[end:]
    return whole


CORPUS = '{"_id": "d1", "title": "Tea", "text": "Boil."}\n{"_id": "d2", "text": "Schließen"}\n'
QUERIES = '{"_id": "q1", "text": "how?"}\n{"_id": 2, "text": "what?"}\n'
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\n2\td2\t1\n"
BEIR = {
    "corpus.jsonl": CORPUS.encode(),
    "queries.jsonl": QUERIES.encode(),
    "qrels/test.tsv": QRELS.encode(),
}


@fuzz
@given(st.data(), st.sampled_from(sorted(BEIR)))
def test_beir_folder(tmp_path: Path, data: st.DataObject, name: str) -> None:
    (tmp_path / "qrels").mkdir(exist_ok=True)
    for file, content in BEIR.items():
        (tmp_path / file).write_bytes(data.draw(damaged(content)) if file == name else content)
    refusal = ""
    try:
        found = load_splits(tmp_path)["test"]
    except (ValueError, OSError) as error:
        refusal = f"refused: {error}"
    if refusal:
        assert name in refusal
        return
    for text in (*found.queries.values(), *found.corpus.values()):
        assert text.strip()
        text.encode()
    assert all(grades.keys() <= found.corpus.keys() for grades in found.relevant.values())
    assert found.relevant.keys() <= found.queries.keys()
    assert len(found.triplets(0)) == sum(map(len, found.relevant.values()))


PAIRS = {
    "pairs.csv": "query,document,score\n"
    + "".join(f'"q, {i}",d{i % 7},{i % 3}\n' for i in range(30)),
    "pairs.jsonl": "".join(f'{{"question": "q{i}", "answer": ["a", "b{i}"]}}\n' for i in range(30)),
    "texts.md": "A sentence of more than eight words is a chunk of its own.\n\n" * 20,
}


@fuzz
@given(st.data(), st.sampled_from(sorted(PAIRS)))
def test_pairs(tmp_path: Path, data: st.DataObject, name: str) -> None:
    separators = [b",", b";", b"|", b"[", b"]", b"sep=;\n", b'""']
    (tmp_path / name).write_bytes(data.draw(damaged(PAIRS[name].encode(), separators)))
    try:
        splits = load_splits(tmp_path / name)
    except DataError:
        return
    for part in (splits[split] for split in splits):
        for text in (*part.queries.values(), *part.corpus.values()):
            assert text.strip()
            text.encode()
