"""Encoder in the actors of Ray Data gives the files that encode_corpus gives in one process."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _tiny import ROWS, load_transformer, save_transformer

from st_magnitude.data.encode import encode_corpus
from st_magnitude.data.encoder import Encoder

ray = pytest.importorskip("ray", reason="`make test-ray` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CORPUS = {f"d{number}": text for number, text in enumerate(text for row in ROWS for text in row[:3])}  # 48


@pytest.fixture
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


def test_encoder_in_a_pipeline(cluster, tmp_path):
    """As the docstring shows it: files with the schema and the record of encode_corpus, and its embeddings."""
    model = load_transformer(save_transformer(tmp_path / "transformer"))
    model.save_pretrained(str(tmp_path / "model"))
    encode_corpus(model, CORPUS, tmp_path / "one")
    rows = ({"_id": key, "text": text} for key, text in CORPUS.items())
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ray.data.read_json(str(tmp_path / "corpus.jsonl")).map_batches(
        Encoder,
        fn_constructor_args=(str(tmp_path / "model"),),
        batch_format="pyarrow",
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=1),
    ).write_parquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out")
    expected = pa.concat_tables(map(pq.read_table, sorted((tmp_path / "one").glob("*.parquet"))))
    assert table.schema.types == expected.schema.types
    found = dict(zip(table["_id"].to_pylist(), table["embedding"].to_pylist(), strict=True))
    assert found.keys() == CORPUS.keys()
    rows_found = [found[key] for key in expected["_id"].to_pylist()]
    np.testing.assert_allclose(rows_found, np.stack(expected["embedding"].to_numpy()), rtol=1e-5, atol=5e-6)
