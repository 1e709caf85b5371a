"""Embeddings of a corpus in shards: what is in them, what is made again, what is refused."""

import gzip
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _tiny import ROWS
from datasets import Dataset, load_dataset
from filelock import FileLock
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW
from typer.testing import CliRunner

from st_magnitude.commands.app import app
from st_magnitude.data import encode
from st_magnitude.data.beir import DataError
from st_magnitude.data.encode import encode_corpus, load_embeddings
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

CORPUS = {f"d{i}": text for i, text in enumerate(text for row in ROWS for text in row[1:3])}  # 32, short and long


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def words():
    """Counts words: a model without weights, whose embeddings are known."""
    return SentenceTransformer(modules=[BoW(["tea", "list", "see"])], similarity_fn_name="dot", device="cpu")


def write_lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".lock")}


def beir(folder):
    write_lines(folder / "corpus.jsonl", ({"_id": k, "text": t, "metadata": {}} for k, t in CORPUS.items()))
    write_lines(folder / "queries.jsonl", [{"_id": "q", "text": "not a document"}])
    return folder


def parquet_folder(folder):
    folder.mkdir()
    rows = Dataset.from_dict({"id": list(CORPUS), "text": list(CORPUS.values()), "other": [0] * 32})
    for part in (0, 1):
        rows.shard(2, part, contiguous=True).to_parquet(folder / f"{part}.parquet")
    return folder


def compressed(folder):
    content = (beir(folder) / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl").unlink()
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(content))
    return folder / "corpus.jsonl.gz"


SOURCES = {
    "mapping": lambda folder: CORPUS,
    "Dataset": lambda folder: Dataset.from_dict({"_id": list(CORPUS), "text": list(CORPUS.values()), "n": [0] * 32}),
    "BEIR folder": lambda folder: str(beir(folder)),
    "compressed jsonl": compressed,
    "parquet folder": parquet_folder,
}


@pytest.mark.parametrize("source", SOURCES)
def test_equal_to_one_plain_call(model, tmp_path, source):
    expected = model.encode_document(list(CORPUS.values()))
    record = encode_corpus(model, SOURCES[source](tmp_path / "corpus"), tmp_path / "out", shard_size=7)
    assert (record["documents"], record["encoded"], record["dimension"]) == (32, 32, 32)
    found = load_embeddings(tmp_path / "out")
    assert list(found["_id"]) == list(CORPUS)
    np.testing.assert_allclose(found[:]["embedding"], expected, rtol=1e-5, atol=5e-6)  # entries are about 1
    norms = np.linalg.norm(expected, axis=1)
    assert norms.std() > 0.1
    np.testing.assert_allclose(np.linalg.norm(found[:]["embedding"], axis=1), norms, rtol=1e-6)


def test_role_and_prompt(words, tmp_path):
    words.prompts = {"query": "tea ", "document": "list "}
    words.append(ExponentNorm(1.0, 0.0))
    for name, options, expected in (
        ("document", {}, [0, 1, 2]),
        ("query", {"role": "query"}, np.array([1, 0, 2]) / 5**0.5),
        ("prompt", {"prompt": "tea tea ", "dtype": "float16"}, [2, 0, 2]),
    ):
        encode_corpus(words, {"a": "see see"}, tmp_path / name, **options)
        np.testing.assert_allclose(load_embeddings(tmp_path / name)[0]["embedding"], expected, rtol=1e-6)


def test_a_folder_that_others_read(words, tmp_path):
    """pyarrow, datasets' load_dataset and torch, without this package."""
    encode_corpus(words, CORPUS, tmp_path / "out", shard_size=20)
    table = pq.read_table(tmp_path / "out" / "shard-00001.parquet")
    assert table.schema.types == [pa.string(), pa.list_(pa.float32(), 3)]
    assert table["_id"].to_pylist() == list(CORPUS)[20:]
    expected = torch.from_numpy(words.encode_document(list(CORPUS.values())[:2]))
    for loaded in (load_dataset(str(tmp_path / "out"), split="train"), load_embeddings(tmp_path / "out")):
        assert list(loaded["_id"]) == list(CORPUS)
        assert torch.equal(loaded.with_format("torch")[:2]["embedding"], expected)
    record = json.loads((tmp_path / "out" / "encoding.json").read_text())
    assert (record["similarity_fn_name"], record["index_metric"]) == ("dot", "inner product")


@pytest.mark.parametrize("damage", ["missing", "truncated", "of other rows"])
def test_only_what_is_missing_or_damaged_is_encoded_again(model, tmp_path, caplog, damage):
    output = tmp_path / "out"
    encode_corpus(model, CORPUS, output, shard_size=10)
    before = contents(output)
    shard = output / "shard-00001.parquet"
    if damage == "missing":
        shard.unlink()
    elif damage == "of other rows":
        shard.write_bytes((output / "shard-00003.parquet").read_bytes())
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    (output / ".shard-00001.parquet.tmp").write_bytes(b"half of")
    with pytest.raises(ValueError, match=r"out has 3 of 4 shards: run encode_corpus again"):
        load_embeddings(output)
    caplog.clear()
    assert encode_corpus(model, CORPUS, output, shard_size=10, batch_size=32)["encoded"] == 10
    assert ("shard-00001.parquet is damaged" in caplog.text) == (damage != "missing")
    assert contents(output) == before


CHANGES = {
    "weights": lambda model: next(model.parameters()).data[0, 0].add_(1e-6),
    "pooling": lambda model: setattr(model[1], "pooling_mode", "cls"),
    "length": lambda model: setattr(model, "max_seq_length", 8),
    "prompts": lambda model: setattr(model, "prompts", {"document": "d: "}),
    "precision": lambda model: model.half(),
    "words": lambda model: model.tokenizer.backend_tokenizer.add_tokens(["odyssey!"]),
    "heads": lambda model: setattr(model.config, "n_heads", 4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_refused(model, tmp_path, change):
    encode_corpus(model, CORPUS, tmp_path / "out")
    CHANGES[change](model)
    with pytest.raises(FileExistsError, match=r"other settings: model \('\w+' there, '\w+' now\)\. Choose another"):
        encode_corpus(model, CORPUS, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "query"}, r"role \('document' there, 'query' now\)"),
        ({"shard_size": 9, "dtype": "float16"}, r"dtype .*, shard_size \(8 there, 9 now\)"),
        ({"corpus": CORPUS | {"d3": "another"}}, r"settings: corpus "),
        ({"corpus": {key + text[0]: text[1:] for key, text in CORPUS.items()}}, "settings: corpus "),
    ],
    ids=str,
)
def test_another_corpus_or_setting_is_refused(words, tmp_path, options, message):
    encode_corpus(words, CORPUS, tmp_path / "out", shard_size=8)
    before = contents(tmp_path / "out")
    with pytest.raises(FileExistsError, match=message):
        encode_corpus(words, **({"corpus": CORPUS, "output": tmp_path / "out", "shard_size": 8} | options))
    assert contents(tmp_path / "out") == before


ROW = {"_id": "a", "text": "tea"}


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ({}, "no documents"),
        ({"a": "tea", "b": 7}, r"corpus, row 1 \(the first is 0\): 'b' has a title or text that is not a string"),
        ([ROW, ROW | {"_id": "b"}, ROW, ROW], r"Documents 0 and 2 .* have the same id, 'a': make ids unique"),
        ([ROW, {"_id": "b", "text": ""}], r"c\.jsonl, line 2: 'b' has an empty text"),
    ],
    ids=str,
)
def test_bad_documents(words, tmp_path, corpus, message):
    if isinstance(corpus, list):
        corpus = write_lines(tmp_path / "c.jsonl", corpus)
    with pytest.raises(DataError, match=message):
        encode_corpus(words, corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_jobs_share_a_folder(words, tmp_path, monkeypatch):
    """A job leaves out the shard that another one has locked, and takes over one whose job has died."""
    encode_corpus(words, CORPUS, tmp_path / "one", shard_size=7)
    output, encode_shard = tmp_path / "out", encode._encode_shard

    def in_turns(encoder, output, shard, *rest):
        if shard == 1:  # a second job comes while the first one is here
            monkeypatch.setattr(encode, "_encode_shard", encode_shard)
            with FileLock(output / ".shard-00003.lock"), FileLock(output / ".shard-00001.lock"):
                assert encode_corpus(words, CORPUS, output, shard_size=7)["encoded"] == 11
        return encode_shard(encoder, output, shard, *rest)

    monkeypatch.setattr(encode, "_encode_shard", in_turns)
    assert encode_corpus(words, CORPUS, output, shard_size=7)["encoded"] == 21
    assert contents(output) == contents(tmp_path / "one")
    assert list(output.glob(".shard*")) == []


ROWS_OF_FILE = [{"_id": key, "text": text} for key, text in CORPUS.items()]


@pytest.mark.parametrize(
    ("later", "missing"),
    [([*ROWS_OF_FILE[:20], ROW, *ROWS_OF_FILE[21:]], 12), (ROWS_OF_FILE[:20], 12), ([*ROWS_OF_FILE, ROW], 2)],
    ids=["other", "shorter", "longer"],
)
def test_a_corpus_that_changes_while_it_is_encoded(words, tmp_path, monkeypatch, later, missing):
    file = write_lines(tmp_path / "corpus.jsonl", ROWS_OF_FILE)
    whole = encode._are_whole
    with monkeypatch.context() as patch:  # after the first reading
        patch.setattr(encode, "_are_whole", lambda *given: write_lines(file, later) and whole(*given))
        with pytest.raises(DataError, match=r"changed in shard \d while it was encoded"):
            encode_corpus(words, file, tmp_path / "out", shard_size=10)
    write_lines(file, ROWS_OF_FILE)
    assert encode_corpus(words, file, tmp_path / "out", shard_size=10)["encoded"] == missing


@pytest.mark.parametrize(("text", "dtype"), [("nan", "float32"), ("large", "float16")])
def test_embeddings_that_are_not_finite(words, tmp_path, monkeypatch, text, dtype):
    def encode_document(texts, **_):
        return np.array([[{"nan": np.nan, "large": 1e5}.get(text, 1.0), 1.0, 1.0] for text in texts], dtype=np.float32)

    monkeypatch.setattr(words, "encode_document", encode_document, raising=False)
    with pytest.raises(DataError, match=f"embedding of 'b' is not finite in {dtype}"):
        encode_corpus(words, {"a": "tea", "b": text, "c": "tea"}, tmp_path / "out", dtype=dtype, shard_size=2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock", ".shard-00000.lock", "encoding.json"}


def test_command_line(model, tmp_path):
    model.save_pretrained(str(tmp_path / "model"))
    output, corpus = tmp_path / "out", beir(tmp_path / "data")
    (tmp_path / "options.yaml").write_text(f"corpus: {corpus}\noutput: {output}\nshard_size: 10\ndevices: [cpu]\n")

    def run(*options):
        command = ["encode", tmp_path / "model", "--config", tmp_path / "options.yaml", *options]
        return CliRunner().invoke(app, list(map(str, command)))

    done = run("--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["encoded"] == 32
    assert len(load_embeddings(output)) == 32
    assert "encoded 0 of 32 documents" in run().stdout
    for options, message in (
        (("--max-length", 8), "made with other settings: model ("),
        (("--corpus", tmp_path / "nowhere"), "does not exist"),
        (("--output", corpus / "corpus.jsonl"), "is a file"),
    ):
        refused = run(*options)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.replace("│", " ").split())
