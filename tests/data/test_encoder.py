"""Encoder on Arrow batches, as Ray and Spark call it."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

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
