"""Encoder on Arrow batches, as Ray and Spark call it."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude.data.beir import DataError
from st_magnitude.data.encode import encode_corpus
from st_magnitude.data.encoder import Encoder

BATCH = {"_id": ["a", "b"], "text": ["see", "tea tea"], "title": [None, "list"], "other": [[1], [2]]}
EXPECTED = np.array([[0, 0, 1], [2, 1, 0]], dtype=np.float32)


@pytest.fixture
def words():
    return SentenceTransformer(modules=[BoW(["tea", "list", "see"])], similarity_fn_name="dot", device="cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", [pa.table, pa.RecordBatch.from_pydict])
def test_a_batch_keeps_its_type(words, kind, dtype):
    encoder = Encoder(words, dtype=dtype)
    found = encoder(kind(BATCH))
    assert type(found) is type(kind(BATCH))
    assert found.schema.types == [pa.string(), pa.list_(getattr(pa, dtype)(), 3)]
    assert found["_id"].to_pylist() == ["a", "b"]
    np.testing.assert_array_equal(found["embedding"].to_pylist(), EXPECTED)
    batches = encoder(iter([kind(BATCH), kind(BATCH)[1:], kind(BATCH)[:0]]))  # as Spark calls it
    assert [batch["_id"].to_pylist() for batch in batches] == [["a", "b"], ["b"], []]


def test_arrow_has_the_schema_and_the_record_of_encode_corpus(words, tmp_path):
    written = encode_corpus(words, {"a": "see"}, tmp_path / "out")
    record = json.loads(Encoder(words)(pa.table(BATCH)).schema.metadata[b"st_magnitude"])
    assert record == {name: written[name] for name in record}
    assert {"model", "index_metric", "role", "dimension", "dtype"} <= record.keys()


def test_a_path_is_loaded_by_each_process(words, tmp_path):
    words.save_pretrained(str(tmp_path / "model"))
    encoder = Encoder(tmp_path / "model", role="query", device="cpu")
    sizes = [len(pickle.dumps(encoder))]
    np.testing.assert_array_equal(encoder(pa.table(BATCH))["embedding"].to_pylist(), EXPECTED)
    sizes.append(len(pickle.dumps(encoder)))
    assert sizes[0] == sizes[1] < 500
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(encoder))(pa.table(BATCH))["embedding"].to_pylist(), EXPECTED
    )


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
        Encoder(words)(pa.table(batch))


def test_an_embedding_that_is_not_finite(words, monkeypatch):
    monkeypatch.setattr(words, "encode_document", lambda texts, **_: np.full((len(texts), 3), np.nan), raising=False)
    with pytest.raises(DataError, match="embedding of 'a' is not finite in float32"):
        Encoder(words)(pa.table(BATCH))
