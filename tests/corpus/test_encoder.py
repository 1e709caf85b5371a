"""Encoder on batches of every type, and jobs that share one folder."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from filelock import FileLock
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW
from typer.testing import CliRunner

from st_magnitude.commands.app import app
from st_magnitude.corpus import Encoder
from st_magnitude.corpus.encoding import encode_corpus, load_embeddings
from st_magnitude.data.beir import DataError

BATCH = {"_id": ["a", "b"], "text": ["see", "tea tea"], "title": [None, "list"], "other": [[1], [2]]}
EXPECTED = np.array([[0, 0, 1], [2, 1, 0]], dtype=np.float32)
CORPUS = {f"d{number}": "tea " * (number + 1) for number in range(11)}


@pytest.fixture
def words():
    return SentenceTransformer(modules=[BoW(["tea", "list", "see"])], similarity_fn_name="dot", device="cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_batch_keeps_its_type(words, dtype):
    encoder = Encoder(words, dtype=dtype)
    found = encoder({**BATCH, "text": np.array(BATCH["text"])})
    assert found["_id"].tolist() == ["a", "b"]
    assert found["embedding"].dtype == dtype
    np.testing.assert_array_equal(found["embedding"], EXPECTED)

    frame = pytest.importorskip("pandas").DataFrame(BATCH)
    frames = encoder(iter([frame, frame.iloc[1:]]))  # as Spark calls it
    np.testing.assert_array_equal(np.stack(next(frames)["embedding"]), EXPECTED)
    assert next(frames)["_id"].tolist() == ["b"]

    for kind in (pa.table, pa.RecordBatch.from_pydict):
        found = encoder(kind(BATCH))
        assert type(found) is type(kind(BATCH))
        assert found.schema.types == [pa.string(), pa.list_(getattr(pa, dtype)(), 3)]
        np.testing.assert_array_equal(np.stack(found.to_pandas()["embedding"]), EXPECTED)
    assert encoder(pa.table(BATCH)[:0]).num_rows == 0


def test_arrow_has_the_schema_and_the_record_of_encode_corpus(words, tmp_path):
    written = encode_corpus(words, {"a": "see"}, tmp_path / "out")
    record = json.loads(Encoder(words)(pa.table(BATCH)).schema.metadata[b"st_magnitude"])
    assert record == {name: written[name] for name in record}
    assert {"model", "index_metric", "role", "dimension", "dtype"} <= record.keys()


def test_a_path_is_loaded_by_each_process(words, tmp_path):
    words.save_pretrained(str(tmp_path / "model"))
    encoder = Encoder(tmp_path / "model", role="query", device="cpu")
    sizes = [len(pickle.dumps(encoder))]
    np.testing.assert_array_equal(encoder(BATCH)["embedding"], EXPECTED)
    sizes.append(len(pickle.dumps(encoder)))
    assert sizes[0] == sizes[1] < 500
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(encoder))(BATCH)["embedding"], EXPECTED)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": ["tea"]}, r"the batch has the columns \['text'\]: it needs _id"),
        ({"id": [1, 2], "text": ["tea", ""]}, r"batch, row 1 .*: '2' has an empty text"),
    ],
    ids=["no ids", "an empty text"],
)
def test_bad_batches(words, batch, message):
    with pytest.raises(DataError, match=message):
        Encoder(words)(batch)


def test_an_embedding_that_is_not_finite(words, monkeypatch):
    monkeypatch.setattr(words, "encode_document", lambda texts, **_: np.full((len(texts), 3), np.nan), raising=False)
    with pytest.raises(DataError, match="embedding of 'a' is not finite in float32"):
        Encoder(words)(BATCH)


def test_jobs_share_a_folder(words, tmp_path):
    """In any order; what a job leaves out of its part, a job without parts encodes."""
    encode_corpus(words, CORPUS, tmp_path / "one", shard_size=2)
    found = {job: encode_corpus(words, CORPUS, tmp_path / "out", shard_size=2, part=(job, 4)) for job in (3, 1)}
    assert {job: record["encoded"] for job, record in found.items()} == {3: 2, 1: 4}
    with pytest.raises(ValueError, match="has 3 of 6 shards"):
        load_embeddings(tmp_path / "out")
    (tmp_path / "out" / ".shard-00001.parquet.tmp").write_bytes(b"of a job that runs")
    assert encode_corpus(words, CORPUS, tmp_path / "out", shard_size=2, part=(1, 4))["encoded"] == 0
    assert (tmp_path / "out" / ".shard-00001.parquet.tmp").exists()
    assert encode_corpus(words, CORPUS, tmp_path / "out", shard_size=2)["encoded"] == 5
    for file in (tmp_path / "one").glob("[!.]*"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    assert list(load_embeddings(tmp_path / "out")["_id"]) == list(CORPUS)


def test_folders_of_several_jobs_are_one_corpus_in_one_folder(words, tmp_path):
    for job in (1, 2):
        encode_corpus(words, CORPUS, tmp_path / str(job), shard_size=2, part=(job, 2))
    for shard in (tmp_path / "2").glob("shard-*"):
        shard.rename(tmp_path / "1" / shard.name)
    assert list(load_embeddings(tmp_path / "1")["_id"]) == list(CORPUS)


@pytest.mark.parametrize(
    ("running", "part", "is_refused"),
    [
        ("-1-of-2", (2, 2), False),
        ("-1-of-2", (1, 2), True),
        ("-1-of-2", (1, 1), True),
        ("-1-of-2", (3, 3), True),
        ("", (1, 2), True),
    ],
)
def test_jobs_that_would_write_the_same_files_are_refused(words, tmp_path, monkeypatch, running, part, is_refused):
    monkeypatch.setattr("st_magnitude.corpus.encoding._PATIENCE", 0.1)
    encode_corpus(words, CORPUS, tmp_path / "out", shard_size=2, part=(1, 6))
    with FileLock(tmp_path / "out" / f".lock{running}"):
        if not is_refused:
            assert encode_corpus(words, CORPUS, tmp_path / "out", shard_size=2, part=part)["encoded"] == 5
            return
        with pytest.raises(OSError, match="Another process is writing to"):
            encode_corpus(words, CORPUS, tmp_path / "out", shard_size=2, part=part)


def test_the_command(words, tmp_path, caplog):
    words.save_pretrained(str(tmp_path / "model"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in CORPUS.items()))
    command = ["encode", str(tmp_path / "model"), "--corpus", str(corpus), "--output", str(tmp_path / "out")]
    command += ["--shard-size", "4"]
    for shard, said in (
        ("2/4", "encoded 4 of 11 documents. Part 2/4 of "),
        ("4/4", "encoded 0 of 11 documents. Part 4/4 of "),
        ("0/4", "part (--shard) is 0 of 4; parts are counted from 1"),
        ("half", "--shard takes two whole numbers, such as 2/8; got 'half'"),
    ):
        done = CliRunner().invoke(app, [*command, "--shard", shard])
        assert said in " ".join(done.output.replace("│", " ").split())
        assert (done.exit_code == 0) == ("encoded" in said)
    assert "Part 4 of 4 is empty: there are 3 shards" in caplog.text
