"""Files as people have them: each gives its rows, a note on what is left out, or one line that says
what to do."""

import csv
import gzip
import io
import itertools
import json
import re
from collections.abc import Callable
from datetime import datetime

import pandas
import polars
import pyarrow
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.data_files import SPLIT_KEYWORDS
from pyarrow import parquet
from test_pairs import PAIRS, ROWS, pairs_of

from st_magnitude.data.beir import DataError
from st_magnitude.workbench.files.pairs import load_splits

CSV = "query,document\n" + "".join(f"{query},{document}\n" for query, document in PAIRS)
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def written(quoting: int, mark: str, rows: list[tuple[str, ...]]) -> str:
    text = io.StringIO()
    options = {"quoting": quoting, "delimiter": mark, "lineterminator": "\n"}
    if quoting == csv.QUOTE_NONE:
        return "".join(mark.join(row) + "\n" for row in rows)
    csv.writer(text, **options).writerows(rows)
    return text.getvalue()


WORDS = [(word, split) for split, words in SPLIT_KEYWORDS.items() for word in words]
PATHS = ["{}.csv", "{}/0000.csv", "split={}/part.csv", "squad_{}.csv", "x/{}-00000-of-2.csv"]


def test_a_split_that_a_name_says_is_used(tmp_path):
    """By every word by which `datasets` knows one, in a name or a folder."""
    for (word, split), path in zip(WORDS, itertools.cycle(PATHS), strict=False):
        split = "dev" if split == "validation" else str(split)
        other = "train" if split != "train" else "test"
        for name, rows in ((word, ROWS[:6]), (other, ROWS[6:])):
            file = tmp_path / word / path.format(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows).to_csv(file)
        splits = load_splits(tmp_path / word)
        queries = {row["query"] for row in ROWS[:6]}
        found = {*splits[split].queries.values()}
        assert found == queries if split != "train" else found < queries  # dev is drawn from it


def test_a_name_that_gives_no_splits_is_told(tmp_path):
    for name, rows in (("pairs", ROWS[6:]), ("my_test", ROWS[:6])):
        Dataset.from_list(rows).to_csv(tmp_path / f"{name}.csv")
    for source in (tmp_path, tmp_path / "my_test.csv", {"test": ROWS}):
        assert "Only the test split is named" in load_splits(source).notes[0]
    for name in ("a_train", "train_test"):
        Dataset.from_list(ROWS[6:]).to_csv(tmp_path / f"{name}.csv")
    notes = load_splits(tmp_path).notes
    for name in ("pairs", "train_test"):
        assert f"Left out {name}.csv, which by its name is no split." in notes


QUOTES = ['"starts', 'ends"', '"whole"', 'in "the" middle', "plain", '""', '5" x 7"']


MANY = [(f"{a} {i} {b}", f"d{i}") for i, (a, b) in enumerate(itertools.product(QUOTES, QUOTES))]
MANY += [(f"d{i}x", b) for i, b in enumerate(QUOTES)]
ENDS_LATER = [('"Tea', "d0"), *((f"q{i}", f"d{i}") for i in range(1, 9)), ('rain"', "d9")]


@pytest.mark.parametrize("pairs", [MANY, ENDS_LATER])
@pytest.mark.parametrize(
    ("mark", "quoting"),
    [("\t", csv.QUOTE_NONE), *itertools.product("\t,", (csv.QUOTE_MINIMAL, csv.QUOTE_ALL))],
)
def test_no_row_is_lost_to_a_quote(tmp_path, mark, quoting, pairs):
    """Two texts with one quote each, with rows between them: as many rows as were written."""
    (tmp_path / "a.tsv").write_text(written(quoting, mark, [("query", "document"), *pairs]))
    splits = load_splits(tmp_path / "a.tsv")
    assert len(pairs_of(splits)) == len(pairs)
    if quoting != csv.QUOTE_NONE:
        assert pairs_of(splits) == {*pairs}
    else:
        assert any("quotes were read as they stand" in note for note in splits.notes)


@pytest.mark.parametrize("mark", "\t,")
def test_cells_that_span_lines_are_counted(tmp_path, mark):
    pairs = [("a\nb", "c\td,e"), ("f", "g\n\n\nh"), ("i", "j")]
    text = written(csv.QUOTE_MINIMAL, mark, [("query", "document"), *pairs])
    (tmp_path / "a.csv").write_text(text)
    splits = load_splits(tmp_path / "a.csv")
    assert pairs_of(splits) == {*pairs}
    assert "2 rows of several lines, the longest of 4 at line 4." in splits.notes[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", ("\ufeff" + CSV.replace(",", ";").replace("\n", "\r\n")).encode()),
        ("a.csv", f"{CSV.replace('query,', 'Question, ').replace(',', '|')}\n\n"),
        ("a.csv", CSV.replace("query,document", "text,Category")),
        ("a.csv", CSV.replace("\n", ",,\n")),
        ("a.csv", CSV.replace("\n", ",x\n").replace(",x", ",", 1)),
        ("a.csv", re.sub(r"(.*),(.*)", r'"\1", "\2"', CSV)),
        ("a.csv", re.sub(r"(.*),(.*)", r"| \1 | \2 |", CSV).replace("\n", "\n|---|:--|\n", 1)),
        ("a.csv", CSV.encode("utf-16-be")),
        ("a.csv", CSV.encode("utf-32")),
        ("a.CSV", CSV),
        ("a.csv.gz", gzip.compress(CSV.encode())),
        ("a.tsv", CSV.replace(",", "\t").replace("\n", "\r").encode("utf-16")),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS).encode("utf-16")),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
    ],
)
def test_files_that_are_read(tmp_path, name, content):
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(raw)
    for source in (tmp_path / name, tmp_path):
        assert pairs_of(load_splits(source)) == {*PAIRS}


def spreadsheet(file, rows, cover=()):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for cells in rows:
        book.active.append(cells)
    book.create_sheet("b").append(cover)
    book.save(file)


def test_a_spreadsheet(tmp_path):
    """With a second sheet, and with a date for a text."""
    file = tmp_path / "a.xlsx"
    rows = [("query", "document", "score"), ("what?", "NA", 1), (), ("how?", 7, True)]
    rows.append(("a b", "c", 0))
    spreadsheet(file, rows, cover=["Questions of 2024"])
    (tmp_path / "README.md").write_text("about it")
    splits = load_splits(tmp_path)
    assert pairs_of(splits) == {("what?", "NA"), ("how?", "7")}
    assert "sheet 'Sheet' of ['Sheet', 'b']; --sheet NAME" in " ".join(splits.notes)
    with pytest.raises(DataError, match=r"a.xlsx has no sheet 'c', but Sheet, b\."):
        load_splits(file, sheet="c")
    with pytest.raises(DataError, match=r"a\.xlsx has no rows"):
        load_splits(file, sheet="b")
    spreadsheet(file, [*rows, ("why?", datetime(2024, 1, 2), 1)])
    with pytest.raises(DataError, match=r"sheet 'Sheet' .*, row 6: the document is datetim"):
        load_splits(file)


def arrow(header, rows):
    columns = [pyarrow.array(column) for column in zip(*rows, strict=True)]
    return pyarrow.Table.from_arrays(columns, names=header)


HEADER = ("query", "document")
WRITERS = {
    "a.csv": lambda file, header, rows: file.write_text(written(0, ",", [header, *rows])),
    "a.tsv": lambda file, header, rows: file.write_text(written(3, "\t", [header, *rows])),
    "a.xlsx": lambda file, header, rows: spreadsheet(file, [header, *rows]),
    "a.parquet": lambda file, header, rows: parquet.write_table(arrow(header, rows), file),
    "a.jsonl": lambda file, header, rows: file.write_text(
        "".join(f'{{"{header[0]}": "{a}", "{header[1]}": "{b}"}}\n' for a, b in rows)
    ),
    "a.json": lambda file, header, rows: file.write_text(
        json.dumps([{"@": a, "@@": b} for a, b in rows])
        .replace('"@"', json.dumps(header[0]))
        .replace('"@@"', json.dumps(header[1]))
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_all_kinds_of_tables_get_the_same_checks(tmp_path, name):
    """A name that is there twice, and the second row, counted from 1 without the header."""
    file = tmp_path / name
    WRITERS[name](file, ("query", "query"), PAIRS)
    with pytest.raises(DataError, match=r"a\..* has the name 'query' twice"):
        load_splits(file)
    WRITERS[name](file, HEADER, [*PAIRS[:1], ("how?", ""), *PAIRS[1:]])
    second = "row 2" if name in ("a.json", "a.parquet") else "line 2" if "jsonl" in name else " 3"
    assert f"Left out 1 row without text, the first at {file}" in str(load_splits(file).notes)
    assert f"{second}." in str(load_splits(file).notes)


def test_a_folder_with_texts_stays_one_of_texts(tmp_path):
    pytest.importorskip("sentencex")
    text = "\n\n".join(f"Number {i} is a sentence of at least eight words." for i in range(9))
    for name in ("a.md", "b.md", "package.json"):
        (tmp_path / name).write_text(text)
    assert "no labels" in load_splits(tmp_path).caveat


def test_a_parquet_with_other_columns(tmp_path):
    """Of kinds that `datasets` does not know, too."""
    n = len(ROWS)
    others = {
        "tags": pyarrow.array([[("a", 1)]] * n, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "id": pyarrow.array([b"x" * 16] * n, pyarrow.uuid()),
        "views": pyarrow.array([["a"]] * n, pyarrow.list_view(pyarrow.string())),
        "vector": pyarrow.array([[0.5, 1.0]] * n),
    }
    table = pyarrow.table({key: [row[key] for row in ROWS] for key in ROWS[0]} | others)
    parquet.write_table(table, tmp_path / "a.parquet")
    splits = load_splits(tmp_path / "a.parquet")
    assert pairs_of(splits) == {*PAIRS}
    assert str(sorted(others)) in " ".join(splits.notes)


COLUMNS = {key: [row[key] for row in ROWS] for key in ROWS[0]}
SOURCES = {
    "pandas": lambda: pandas.DataFrame(ROWS, index=[f"i{n}" for n in range(len(ROWS))]),
    "polars": lambda: polars.DataFrame(ROWS),
    "pyarrow": lambda: pyarrow.table(COLUMNS),
    "columns": lambda: COLUMNS,
    "stream": lambda: Dataset.from_list(ROWS).to_iterable_dataset(),
    "rows": lambda: (row for row in ROWS[::-1]),
    "a dict of data sets": lambda: {"train": Dataset.from_list(ROWS)},
    "a dict of frames": lambda: {"train": polars.DataFrame(ROWS)},
    "a DatasetDict": lambda: DatasetDict(all=Dataset.from_list(ROWS)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_objects_that_are_read(kind):
    """Whatever the order of the rows, the splits are the same."""
    splits, expected = load_splits(SOURCES[kind]()), load_splits(ROWS)
    for name in ("train", "dev", "test"):
        assert {*splits[name].queries.values()} == {*expected[name].queries.values()}


@pytest.mark.parametrize("kind", ["data set", "stream", "Parquet"])
def test_classes_have_names(tmp_path, kind):
    """-1 and None are no class, as in hidden labels."""
    features = Features(text=Value("string"), label=ClassLabel(names=["tea", "rain"]))
    rows = {"text": ["long?", "wet?", "hot?", "how?"], "label": [0, 1, -1, None]}
    source: object = Dataset.from_dict(rows, features)
    if kind == "stream":
        source = source.to_iterable_dataset()
    elif kind == "Parquet":
        source.add_column("vector", [[0.5]] * 4).to_parquet(tmp_path / "a.parquet")
        source = tmp_path / "a.parquet"
    splits = load_splits(source)
    assert pairs_of(splits) == {("long?", "tea"), ("wet?", "rain")}
    assert "Left out 2 rows without text, the first at" in " ".join(splits.notes)


HUGE = "x" * 200_000
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.pdf", b"%PDF", "pairs in CSV, TSV.* Convert it, as with pandas"),
    ("a.json", pandas.DataFrame(ROWS).to_json(), r"TABLE.to_json\('pairs.json', orient='records'"),
    ("a.json", json.dumps({"data": ROWS}), "no array of rows, but {'data': "),
    ("a.json", "[1, 2]", "row 1: is not a mapping of texts, but 1"),
    ("a.json", "{", "line 1: is not valid JSON"),
    ("a.json", "", "has no rows"),
    ("a.csv.gz", gzip.compress(CSV.encode())[:-20], "cannot be unpacked"),
    ("a.parquet", b"PAR1 torn", "not read as Parquet"),
    ("a.xlsx", b"torn", "not read as xlsx|needs openpyxl"),
    ("a.xlsx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" * 99, "not read as xlsx .*; save it|openpyxl"),
    (
        "a.csv",
        "title,body\na,b\n",
        "a.csv: the columns are title, body.* --columns query=title,document=body;",
    ),
    ("a.csv", "id,q,kind,a\n1,what is it?,x,a drink\n", "--columns query=q,document=a;"),
    ("a.csv", "id,question,c,d\n1,what?,x,a b\n", "--columns query=question,document=d;"),
    ("a.csv", "query,document\na,a\nb,b\n", "In all 2 pairs the document is the query"),
    ("a.csv", "what is tea?,a drink\nand?,b\n", "the columns are what is tea.*write one above it"),
    ("a.csv", "# of Monday\nquery,document\na,b\n", "first line, '# of Monday', has one column"),
    ("a.csv", 'query,document\na,"b" c\nd,e\nf,"g" h\n', "line 2: .*nor does one on 1 other line"),
    ("a.csv", "query,document,split\na,b, Train \nc,d,Trian\n", "line 3: the split 'Trian' is not"),
    ("a.csv", "query,document\na,b\nc,d,e\n", "line 3: has 3 columns, but the header has 2"),
    ("a.csv", 'query,document\n"a\nb",c\nd,"e\nf,g\n', "line 4: a cell in double quotes does not"),
    ("a.csv", "\n", "is empty; write a header"),
    ("a.csv", "query,document\n", "has no rows"),
    ("a.csv", "query,document\na,\n", "no document is relevant"),
    ("a.csv", "query,answer,passage\na,b,c\n", "answer and passage may be the document: choose"),
    ("a.csv", "text,label\na,7\nc,8\n", "numbers, such as '7'.* add one with the names"),
    ("a.csv", "query,document,score\na,b,-2.5\nc,d,-0.5\n", "highest score is -0.5, below"),
    ("a.csv", "query,document,score\na,b,1\nc,d,x\n", "line 3: the score"),
    ("a.csv", f"query,document,score\na,b,{HUGE}\n", "line 2: the score is 'xxx.*; write a number"),
    ("a.csv", f"{HUGE},{HUGE}\na,b\n", "'xxx.* twice"),
    ("a.csv", f"query,document\na,{HUGE}\nb,{HUGE}\n", "All documents are one"),
    ("a.jsonl", json.dumps({"query": f"{HUGE}\ud83d", "document": "b"}), "query is not Unicode"),
]
OBJECTS: list[tuple[Callable[[], object], str]] = [
    (lambda: PAIRS, r"row 0: is not a mapping of texts, but \('Is tea.*'query': q"),
    (lambda: {"query": ["a"], "document": ["b", "c"]}, "columns of the mapping differ in length"),
    (lambda: {"query": "a", "document": "b"}, "query split, row 0: .*pass rows, such as"),
    (lambda: "nowhere.csv", "no file or folder 'nowhere.csv'"),
    (lambda: "nobody/nothing", r"hub gives no data set of this name \(.*nobody/nothing"),
    (lambda: arrow(("query", "query"), PAIRS), "the name 'query' twice"),
    (lambda: [{"query": 1, "document": "b"}], "row 0: the query is 1; write a text"),
    (lambda: 7, "row 0: is not a mapping of texts, but 7; pass rows"),
    (lambda: pandas.DataFrame({"query": ["a", 1], "document": ["b", "c"]}), "not read .*; pass"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_files_that_are_refused_in_a_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((DataError, ImportError), match=message) as refused:
        load_splits(tmp_path / name)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(("source", "message"), OBJECTS)
def test_objects_that_are_refused_by_their_conversion(source, message):
    with pytest.raises(DataError, match=message) as refused:
        load_splits(source())
    assert len(str(refused.value)) < 500


SPELLED = {
    "Python": str,
    "JSON": json.dumps,
    "numpy": lambda texts: str(texts).replace(", ", "\n ").replace("ä", "a"),
}


@pytest.mark.parametrize("spelling", SPELLED)
def test_lists_in_cells_are_several_documents(tmp_path, spelling):
    """As to_csv writes them; a column with one other cell stays one of texts."""
    lists = [[document, f"it's {document}\u00e4"] for _, document in PAIRS]
    rows = [(q, SPELLED[spelling](texts)) for (q, _), texts in zip(PAIRS, lists, strict=True)]
    (tmp_path / "a.csv").write_text(written(0, ",", [HEADER, *rows]))
    splits = load_splits(tmp_path / "a.csv")
    assert len(pairs_of(splits)) == 2 * len(PAIRS)
    assert {*PAIRS} < pairs_of(splits)
    assert "Each text of the lists in the column document counts by itself." in splits.notes
    (tmp_path / "a.csv").write_text(written(0, ",", [HEADER, *rows, ("x", "[sic] y")]))
    assert len(pairs_of(load_splits(tmp_path / "a.csv"))) == len(PAIRS) + 1


def test_judgments_that_are_misnamed(tmp_path):
    """In another format, and with another spelling of an id."""
    load_splits(ROWS).save(tmp_path / "data")
    for file in (tmp_path / "data" / "qrels").glob("*.tsv"):
        file.unlink()
    (tmp_path / "data" / "qrels" / "test.csv").write_text("query-id,corpus-id,score\n")
    with pytest.raises(DataError, match=r"it has no splits\. Convert test.csv to tabs"):
        load_splits(tmp_path / "data")
    (tmp_path / "data" / "queries.jsonl").write_text('{"_id": "01", "text": "a"}\n')
    (tmp_path / "data" / "qrels" / "dev.tsv").write_text("1\td1\t1\n")
    said = "'1' is not in queries.jsonl, or is empty there, where it is '01', not '1'"
    with pytest.raises(DataError, match=said):
        load_splits(tmp_path / "data")


def test_usual_names_of_columns():
    for query, document in (("prompt", "response"), ("input", "output"), ("Prompt", "completion")):
        rows = [{query: row["query"], document: row["document"]} for row in ROWS]
        assert pairs_of(load_splits(rows)) == {*PAIRS}
    with pytest.raises(DataError, match="instruction and input may be the query"):
        load_splits([{"instruction": "a", "input": "", "output": "b"}])


def test_long_documents_are_counted(tmp_path):
    splits = load_splits([*ROWS, {"query": "long?", "document": "word " * 2001}])
    splits.save(tmp_path / "data")
    for notes in (splits.notes, load_splits(tmp_path / "data").notes):
        assert "1 document of more than 10,000 characters" in " ".join(notes)
    assert "The data have" not in " ".join(load_splits(ROWS).notes)
