"""A local Ray with two workers gives what one process gives, whatever happens to them."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _tiny import ROWS, load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from torch import nn

from st_magnitude.corpus import Encoder
from st_magnitude.corpus.encoding import encode_corpus, load_embeddings

ray = pytest.importorskip("ray", reason="pip install 'st-magnitude[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CORPUS = {f"d{number}": text for number, text in enumerate(text for row in ROWS for text in row[:3])}  # 48
SIZE = 5  # nine shards of 5 and one of 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a corpus, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("cluster")
    load_transformer(save_transformer(folder / "transformer")).save_pretrained(str(folder / "model"))
    rows = ({"_id": key, "text": text} for key, text in CORPUS.items())
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    encode_corpus(model, folder / "corpus.jsonl", folder / "one", shard_size=SIZE)
    return folder


@pytest.fixture(scope="module")
def two_workers():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


def assert_same(folder, expected):
    found, expected = load_embeddings(folder)[:], load_embeddings(expected)[:]
    assert found["_id"].tolist() == expected["_id"].tolist()
    np.testing.assert_allclose(found["embedding"], expected["embedding"], rtol=1e-5, atol=5e-6)
    norms = [np.linalg.norm(x["embedding"], axis=1) for x in (found, expected)]
    assert norms[1].std() > 0.1
    np.testing.assert_allclose(*norms, rtol=1e-5)


class Faulty(nn.Module):
    """Kills the process, once, or fails, at the text with the most tokens."""

    def __init__(self, once=None):
        super().__init__()
        self.once = once

    def forward(self, features):
        if features["input_ids"].shape[1] >= 12:
            if self.once is None:
                raise ZeroDivisionError("a long text")
            if self.once.exists():
                self.once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return features


def test_a_worker_that_is_killed_loses_and_doubles_nothing(two_workers, place, tmp_path):
    once = tmp_path / "once"
    once.touch()
    modules = SentenceTransformer(str(place / "model"), device="cpu")
    model = SentenceTransformer(modules=[*modules, Faulty(once)], device="cpu")
    record = encode_corpus(model, place / "corpus.jsonl", tmp_path / "out", shard_size=SIZE, ray="auto")
    assert not once.exists()
    assert record["encoded"] == record["documents"] == 48
    assert_same(tmp_path / "out", place / "one")


def test_an_error_of_a_worker_says_how_far_it_came(two_workers, place, tmp_path):
    modules = SentenceTransformer(str(place / "model"), device="cpu")
    model = SentenceTransformer(modules=[*modules, Faulty()], device="cpu")
    with pytest.raises(OSError, match=r"worker of Ray failed: .*a long text.* of 10 shards are in .*: run the same"):
        encode_corpus(model, place / "corpus.jsonl", tmp_path / "out", shard_size=SIZE, ray="auto")


def test_encoder_in_a_pipeline(two_workers, place, tmp_path):
    """As the docstring shows it: files with the schema and the record of encode_corpus."""
    documents = ray.data.read_json(str(place / "corpus.jsonl"))
    documents.map_batches(
        Encoder,
        fn_constructor_args=(str(place / "model"),),
        batch_format="pyarrow",
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=2),
    ).write_parquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out")
    expected = pa.concat_tables(map(pq.read_table, sorted((place / "one").glob("*.parquet"))))
    assert table.schema.types == expected.schema.types
    found = dict(zip(table["_id"].to_pylist(), table["embedding"].to_pylist(), strict=True))
    assert found.keys() == CORPUS.keys()
    expected_rows = [found[key] for key in expected["_id"].to_pylist()]
    np.testing.assert_allclose(expected_rows, np.stack(expected["embedding"].to_numpy()), rtol=1e-5, atol=5e-6)


INTERRUPTED = """
import os, signal
fsync, times = os.fsync, 0
def interrupted(file):
    global times
    times += 1
    if times == 4:  # a record, two shards
        os.kill(os.getpid(), getattr(signal, {signal!r}))
    fsync(file)
os.fsync = interrupted
from st_magnitude.commands.app import app
app()
"""


@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_the_same_command_goes_on_after_a_signal(place, stop):
    command = ["encode", "model", "--corpus", "corpus.jsonl", "--output", stop, "--shard-size", str(SIZE), "--json"]
    command += ["--ray", "local"]
    programs = (["-c", INTERRUPTED.format(signal=stop)], ["-m", "st_magnitude"])
    runs = [
        subprocess.run([sys.executable, *program, *command], cwd=place, capture_output=True, text=True, check=False)
        for program in programs[: 2 if stop == "SIGINT" else 1]
    ]
    assert runs[0].returncode == 128 + getattr(signal, stop), runs[0].stderr[-2000:]
    assert f"Stopped by {stop} with 2 of 10 shards in {stop}" in runs[0].stderr
    assert "Traceback" not in runs[0].stderr
    if stop == "SIGINT":
        assert runs[1].returncode == 0, runs[1].stderr[-2000:]
        assert json.loads(runs[1].stdout)["encoded"] == 38
        assert_same(place / stop, place / "one")
