"""Files in BEIR's layout, read line by line. An error names the file and the line.

::

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."}    one document per line
    queries.jsonl        {"_id": "q1", "text": "..."}                         one query per line
    qrels/<split>.tsv    query-id <tab> corpus-id <tab> score      score > 0: relevant

TREC's four columns (query, iteration, document, score) are read as well.

Source: Thakur et al. 2021, BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import logging
import math
import re
import unicodedata
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from st_magnitude._checks import InputError, shown
from st_magnitude._files import written

_LAYOUT = "Expected BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv."
HEADER = ("query-id", "corpus-id", "score")
# without case and punctuation; the optional second column is TREC's iteration
_HEADERS = r"(q|topic)\w* (\w+ )?(corpus|doc|passage|pid)\w* (score|rel|label|grade|gain|judg)\w*"
_MEANS_SOMETHING = frozenset("#%&*/@\\")  # punctuation in Unicode, but not in "C#" or "50 %"

Keys = NDArray[np.uint64]

logger = logging.getLogger(__name__)


class DataError(InputError):
    """Data that cannot be used; the message says where the problem is and what to do."""


def _lines(path: Path, raw: bytes | None = None) -> Iterator[tuple[str, str]]:
    """The non-blank lines of a file in UTF-8 or .gz, or of its content, each with its place."""
    path = path if path.is_file() else path.with_name(f"{path.name}.gz")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") if raw is None else io.BytesIO(raw) as file:
            lines = (line for ended in file for line in ended.rstrip(b"\r\n").split(b"\r"))
            for number, raw in enumerate(lines, start=1):
                where = f"{path}, line {number}"
                try:
                    line = raw.decode("utf-8").removeprefix("\ufeff")
                except UnicodeDecodeError:
                    raise DataError(f"{where}: is not UTF-8; save the file as such.") from None
                if line.strip():
                    yield where, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again.") from None


def json_lines(path: Path, raw: bytes | None = None) -> Iterator[tuple[str, object]]:
    """The values of a .jsonl file, or of its content, each with its place."""
    for where, line in _lines(path, raw):
        try:
            value = json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: is not valid JSON ({error}); write one a line.") from None
        yield where, value


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, which names each of its entries once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"an object has the name {shown(twice)} twice")
    return found


def splits_of(folder: str | Path) -> list[str]:
    if not Path(folder).is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. {_LAYOUT}")
    names = (path.stem for path in Path(folder, "qrels").glob("*.tsv"))
    return sorted(name for name in names if not name.startswith("."))  # macOS writes ._dev.tsv


# What nothing shows: Unicode's Default_Ignorable_Code_Point, controls, formats, and U+FFFC, which
# stands for an object
_INVISIBLE = re.compile(
    "[\0-\b\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    "\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


class _Separators(dict[int, str]):
    """By code point: a space for punctuation and for a cell of Braille without dots, "-" for any
    dash or minus, and "." for a decimal point; `_LOOSE` finds those that belong to no number."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        kind = unicodedata.category(letter)
        if kind == "Pd":
            self[code] = "-"
        elif (kind[0] == "P" and letter not in _MEANS_SOMETHING) or letter == "\u2800":
            self[code] = " "
        else:
            self[code] = letter
        return self[code]


_SEPARATORS = _Separators({ord("."): ".", 0x066B: ".", 0x2212: "-"})  # Arabic point, minus
# A point or a sign that is not part of a number: no digit follows, or a letter (but the e of 1e-5)
# or its like stands before it
_LOOSE = re.compile(
    r"[-.](?:(?<=\.)(?!\d)|(?<=-)(?!\.?\d)|(?<=[^\W\d_][-.])(?<!\de-)|(?<=\.\.)|(?<=--))"
)
_EXPONENT = re.compile("[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+")
# of ASCII, a byte for each byte and the bytes to delete, which is several times faster
_PLAIN = "".join(map(chr, range(128))).lower().translate(_SEPARATORS).ljust(256).encode()
_DELETED = "".join(_INVISIBLE.findall("".join(map(chr, range(128))))).encode()


def canonical(text: str) -> str:
    """A text in one spelling: two queries with one canonical text are one query.

    Case, width and composition of letters (NFKC), spaces, punctuation and what nothing shows do not
    count. Symbols do, such as + and #, and what makes another number: the sign and the decimal
    point before a digit, unless a letter stands before it, and exponents, which are spelled with ^.

    Example:
        >>> canonical("Hello,  World?"), canonical("C++"), canonical("?!")
        ('hello world', 'c++', '?!')
        >>> canonical("Is x² = -1.5?"), canonical("10−2."), canonical("Covid-19, no.1")
        ('is x^2 = -1.5', '10-2', 'covid 19 no 1')
    """
    if text.isascii() and (words := _words(text.encode().translate(_PLAIN, _DELETED).decode())):
        return " ".join(words)
    plain = _EXPONENT.sub(r"^\g<0>", _INVISIBLE.sub("", text))
    for _ in range(2):  # lower case can need another composition
        plain = _INVISIBLE.sub("", unicodedata.normalize("NFKC", plain.casefold()))
    return " ".join(_words(plain.translate(_SEPARATORS))) or plain.strip()


def _words(text: str) -> list[str]:
    """Splits a text at spaces, without the points and signs that are not part of a number."""
    text = f"{text} ".replace(". ", " ")  # most of them, in a tenth of the time of a search
    return (_LOOSE.sub(" ", text) if "." in text or "-" in text else text).split()


def keys_of(texts: Iterable[str]) -> Keys:
    """A hash of 64 bits of the canonical spelling of each text, (n,)."""
    spelled = (canonical(text).encode("utf-8", "surrogatepass") for text in texts)
    hashes = (hashlib.blake2b(text, digest_size=8).digest() for text in spelled)
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)


def check_layout(folder: Path, split: str) -> None:
    if split not in (splits := splits_of(folder)):
        files = sorted(path.name for path in folder.glob("qrels/*") if path.suffix != ".tsv")
        others = [name for name in files if name.startswith(f"{split}.") or not splits]
        advice = f"Convert {others[0]} to tabs, without compression." if others else _LAYOUT
        known = f"its splits are {splits}" if splits else "it has no splits"
        raise DataError(f"{folder} has no qrels/{split}.tsv; {known}. {advice}")
    for name in ("corpus.jsonl", "queries.jsonl"):
        if not (folder / name).is_file() and not (folder / f"{name}.gz").is_file():
            raise DataError(f"{folder} has no {name}. {_LAYOUT}")


def read_texts(path: Path, of_queries: bool = False) -> dict[str, str]:
    texts: dict[str, str] = {}
    for where, row in json_lines(path):
        key, text = _id_and_text(row, where, of_queries)
        if key in texts:
            raise DataError(f"{where}: repeats the id {shown(key)}; make ids unique.")
        texts[key] = text
    found = {key: text for key, text in texts.items() if text}
    if empty := len(texts) - len(found):
        logger.warning(f"{path}: {empty:,} empty texts were left out.")
    return found


def _id_and_text(row: object, where: str, is_query: bool) -> tuple[str, str]:
    fields = row if isinstance(row, dict) else {}
    key = fields.get("_id")
    other = fields.get("instruction" if is_query else "title") or ""
    text = "" if fields.get("text", 0) is None else fields.get("text")
    if key is None or not isinstance(text, str) or not isinstance(other, str):
        example = '{"_id": "1", "title": "optional", "text": "..."}'
        raise DataError(f"{where}: is not an object like {example}, but {str(row)[:99]}.")
    if other:
        text = f"{text} {other}" if is_query else f"{other} {text}"
    try:
        f"{key}{text}".encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: {shown(key)} is not Unicode; remove half a character.") from None
    return str(key), text if text.strip() else ""


def read_qrels(
    path: Path, queries: Mapping[str, str], corpus: Mapping[str, str], skip_missing: bool = False
) -> dict[str, dict[str, int]]:
    """Reads judgments: query id -> document id -> grade."""
    judged: dict[str, dict[str, int]] = {}
    missing = 0
    for where, query, document, score in _judgments(path, queries):
        grade = whole_grade(score, where)
        is_known = query in queries and (document in corpus or not (document or grade))
        if not is_known and skip_missing:
            missing += 1
            continue
        if not is_known:
            name, key, known = "corpus", document, corpus
            if query not in queries:
                name, key, known = "queries", query, queries
            raise DataError(
                f"{where}: {shown(key)} is not in {name}.jsonl, or is empty there"
                f"{other_spelling(key, known)}; add its text, remove this line, or leave such lines"
                " out with --skip-empty."
            )
        grades = judged.setdefault(query, {})
        if document and grades.setdefault(document, grade) != grade:
            raise DataError(
                f"{where}: contradicts an earlier line about {shown(document)} and {shown(query)};"
                " keep one."
            )
    if missing:
        logger.warning(f"{missing:,} judgments of texts that are empty or absent were left out.")
    return judged


def write_texts(path: Path, texts: Mapping[str, str]) -> None:
    with written(path) as file:
        for key, text in texts.items():
            file.write(json.dumps({"_id": key, "text": text}, ensure_ascii=False) + "\n")


def write_qrels(
    path: Path, relevant: Mapping[str, Mapping[str, int]], negatives: Mapping[str, Iterable[str]]
) -> None:
    """Writes judgments; a line without a document says that none answers the query."""
    rows: list[tuple[str, str, int | str]] = [HEADER]
    for query, grades in relevant.items():
        rows += [(query, document, grade) for document, grade in sorted(grades.items())]
    for query, documents in negatives.items():
        rows += [(query, document, 0) for document in sorted(documents) or [""]]
    with written(path) as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)


def other_spelling(key: object, known: Iterable[str]) -> str:
    """A remark if an id is known as another number (7.0, 07) or Unicode form; else ""."""

    def plain(given: object) -> str:
        spelled = unicodedata.normalize("NFC", str(given))
        is_number = math.isfinite(number(spelled))
        return spelled.removesuffix(".0").lstrip("0") if is_number else spelled

    found = next((other for other in known if plain(other) == plain(key)), None)
    return "" if found is None else f", where it is {ascii(found)[:99]}, not {ascii(key)[:99]}"


def _judgments(path: Path, queries: Collection[str] = ()) -> Iterator[tuple[str, str, str, str]]:
    """Place, query, document and score of every line. The first line is a header if none of its
    columns is a number and the first is no query."""
    width = 0
    for where, line in _lines(path):
        try:
            columns = next(csv.reader([line], delimiter="\t")) if "\t" in line else line.split()
        except csv.Error as error:
            raise DataError(f"{where}: is not split by tabs ({error}).") from None
        if not width:
            width = len(columns)
            is_header = columns[0] not in queries and all(math.isnan(number(x)) for x in columns)
            plain = " ".join(re.sub(r"[\W_]", "", column.casefold()) for column in columns)
            is_trec = width == 4 and re.fullmatch(r"Q?\d+", columns[1])
            if not (re.fullmatch(_HEADERS, plain) if is_header else is_trec or width == 3):
                raise DataError(
                    f"{where}: has the columns {shown(columns)}, but needs three, with tabs:"
                    f" {', '.join(HEADER)}."
                )
            if is_header:
                continue
        if len(columns) != width:
            raise DataError(f"{where}: has {len(columns)} columns, not {width} as the first line.")
        yield where, columns[0], columns[-2], columns[-1]


def number(value: object) -> float:
    """A number or its text as a float; nan for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def whole_grade(grade: str | float, where: str) -> int:
    """A grade as an int, after a check that it is a whole number, such as 1, 1.0 or "1"."""
    found = grade if type(grade) is int else number(grade)
    if found % 1 or abs(found) >= 2**31:
        raise DataError(
            f"{where}: the score {shown(grade)} is not a whole number below 2^31; use 1 or more for"
            " relevant, 0 for not. A common factor of all grades leaves nDCG as it is."
        )
    return int(found)
