"""A job that is stopped, killed or has no room on the disk, as a shell starts it; and one in several processes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import datasets
import numpy as np
import pytest
from _tiny import ROWS, load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW
from torch import nn

import st_magnitude as stm
from st_magnitude.data.encode import encode_corpus, load_embeddings
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.slow

TEXTS = [text for row in ROWS for text in row[:3]]  # 48
SIZE = 10  # shards of 10, 10, 10, 10 and 8

# The third shard is on the disk, under its temporary name, when a signal comes. fsync counts: a record, two shards.
FAULTY = """
import os, resource, signal, sys
fsync, times = os.fsync, 0
def faulty(file):
    global times
    times += 1
    if times == 4:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    fsync(file)
    if times == 3 and sys.argv[1] == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
os.fsync = faulty
from st_magnitude.commands.app import app
app(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model that ends in an ExponentNorm, a corpus, and what an undisturbed run writes."""
    folder = tmp_path_factory.mktemp("encoding")
    model = load_transformer(save_transformer(folder / "transformer"))
    model = SentenceTransformer(modules=[*model, ExponentNorm(1.0, 0.5)], similarity_fn_name="dot", device="cpu")
    model.save_pretrained(str(folder / "model"))
    rows = ({"_id": f"d{number}", "text": text} for number, text in enumerate(TEXTS))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = encode(folder, "whole")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["encoded"] == len(TEXTS)
    return folder


def encode(place, output, *options, fault=None):
    program = ["-m", "st_magnitude"] if fault is None else ["-c", FAULTY, fault]
    command = [sys.executable, *program, "encode", "model", "--corpus", "corpus.jsonl", "--output", output, "--json"]
    command += ["--shard-size", str(SIZE), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # sums in one order
    with (place / "stdout").open("w+") as out, (place / "stderr").open("w+") as err:  # a pipe would wait for orphans
        done = subprocess.run(command, cwd=place, stdout=out, stderr=err, check=False, env=environment)
    done.stdout, done.stderr = (place / "stdout").read_text(), (place / "stderr").read_text()
    return done


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".lock")}


FAULTS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 143, "disk full": 2}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_same_command_goes_on(place, fault):
    died = encode(place, fault, fault=fault)
    assert died.returncode == FAULTS[fault], died.stderr[-2000:]
    before = contents(place / fault)
    shards = {"shard-00000.parquet", "shard-00001.parquet"}
    assert before.keys() - {".shard-00002.parquet.tmp"} == {"encoding.json", *shards}
    assert (".shard-00002.parquet.tmp" in before) == (fault == "SIGKILL")
    if fault != "SIGKILL":
        assert "2 of 5 shards" in died.stderr
        assert "un the same again to go on" in died.stderr
        assert "Traceback" not in died.stderr

    resumed = encode(place, fault)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert json.loads(resumed.stdout)["encoded"] == 28
    assert contents(place / fault) == contents(place / "whole")


def test_two_processes_give_what_one_gives(place, tmp_path, monkeypatch):
    """With a module of ours in the model; the model is where it was, and no process is left."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model = stm.load(place / "model", device="cpu")
    record = encode_corpus(model, place / "corpus.jsonl", tmp_path / "out", shard_size=SIZE, devices=["cpu", "cpu"])
    assert record["encoded"] == 48
    found, expected = (load_embeddings(folder)[:] for folder in (tmp_path / "out", place / "whole"))
    assert found["_id"].tolist() == expected["_id"].tolist()
    np.testing.assert_allclose(found["embedding"], expected["embedding"], rtol=1e-5, atol=5e-6)


class Fails(nn.Module):
    """Counts words, and fails at one text: with an error, or by the death of its process."""

    def __init__(self, how):
        super().__init__()
        self.words, self.how = BoW(["good"]), how

    def preprocess(self, texts, **_):
        if any("bad" in text for text in texts):
            if self.how == "error":
                raise ZeroDivisionError("a bad text")
            time.sleep(2)  # a process that dies while it hands over a result leaves the queue locked
            os.kill(os.getpid(), signal.SIGKILL)
        return self.words.preprocess(texts)

    def forward(self, features):
        return self.words(features)


@pytest.mark.parametrize(("how", "error"), [("error", ZeroDivisionError), ("death", OSError)])
def test_an_error_in_a_process_is_reported_and_no_process_is_left(tmp_path, how, error):
    model = SentenceTransformer(modules=[Fails(how)], similarity_fn_name="dot", device="cpu")
    corpus = {f"d{i}": "good" for i in range(7)} | {"d7": "bad"}
    message = {"error": "a bad text", "death": "3 of 4 shards in .*: run the same again"}[how]
    with pytest.raises(error, match=message):
        encode_corpus(model, corpus, tmp_path / "out", shard_size=2, devices=["cpu", "cpu"])
    assert not multiprocessing.active_children()
    assert len(list((tmp_path / "out").glob("shard-*"))) == 3
