"""Commands in a process of their own and in two: what they print where, kills and full disks."""

import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from _calls import CALLS, COMMANDS, call
from _cli import invoke
from _processes import TWO_RANKS, closed, forked, full_disk, nobody, python
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS, save_splits
from sentence_transformers import SentenceTransformer
from test_docs import HUB_ID, ROOT, python_blocks

import st_magnitude as stm
from st_magnitude.saving.export import export
from st_magnitude.training.run_folder import WORK
from st_magnitude.workbench.files.pairs import load_splits

pytestmark = pytest.mark.slow

COMMAND = ("-m", "st_magnitude")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a data set."""
    folder = tmp_path_factory.mktemp("shell")
    save_splits(folder / "data", "train", "dev")
    model = load_transformer(save_transformer(folder / "plain"))
    stm.prepare(model, "cosine").save_pretrained(str(folder / "model"))  # as most published models
    return folder


TRAIN = ("train", "--data", "data", "--model", "model", "--batch-size", 4, "--max-length", 16)


def test_a_process_keeps_stdout_for_the_figures(place):
    """Upstream's progress bars and logs, which only a process shows, go to stderr."""
    arguments = (*COMMAND, *TRAIN, "--max-steps", 2, "--output", "process", "--json")
    done = python(*arguments, cwd=place)
    assert json.loads(done.stdout)["steps"] == 2
    assert "%|" not in done.stderr  # no progress bars where there is no terminal
    refused = forked(*COMMAND, "compress", "nowhere", "--data", "data", code=2, cwd=place)
    assert refused.stdout == ""
    assert "'nowhere'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "streams", "code", "said"),
    [
        ("", {"stdout": nobody}, 141, ""),
        ("--json", {"stdout": nobody}, 141, ""),
        ("--json", {"stdout": full_disk}, 2, "Error: No space left on device, where stdout"),
        ("", {"stdout": closed}, 0, ""),
        ("", {"stderr": closed}, 0, ""),
        ("", {"stdin": closed}, 0, ""),
        ("--data none", {"stderr": closed}, 2, ""),
        ("--help", {"stdout": full_disk}, 2, "Error: No space left on device, where stdout"),
    ],
)
def test_output_that_nobody_takes(place, arguments, streams, code, said):
    load_transformer(place / "plain").save_pretrained(str(place / "model-raw"))
    calibrate = (*COMMAND, "calibrate", "model-raw", "--data", "data", *arguments.split())
    done = forked(*calibrate, code=code, cwd=place, **streams)
    assert said in done.stderr
    assert not re.search("Traceback|Broken|Exception", done.stderr)


EVERY = """
import json, sys
from st_magnitude.workbench.commands.app import main

codes = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["st-magnitude", *words]
    try:
        main()
    except SystemExit as end:
        codes[words[0]] = end.code
print(json.dumps(codes), file=sys.stderr)
"""


def test_no_encoding_is_a_fault(place, tmp_path):
    """stdout in cp1252, which cannot show all of the texts."""
    pairs = [(QUERIES[q], CORPUS[d]) for q, found in RELEVANT_DOCS.items() for d in found]
    rows = [{"query": f"{query} → 有", "document": f"{text} ∑"} for query, text in pairs]
    load_splits(rows).save(tmp_path / "data")
    export(load_transformer(place / "plain"), tmp_path / "model")
    calls = [call(name, out=name) for name in CALLS]
    environment = {"PYTHONIOENCODING": "cp1252"}
    done = python("-c", EVERY, json.dumps(calls), cwd=tmp_path, environment=environment)
    codes = json.loads(done.stderr.splitlines()[-1])
    assert codes.keys() == COMMANDS.keys()
    few = ("train", "compare", "check-serving")  # queries, and nobody listens
    assert {codes.pop(name) for name in few} <= {0, 2, 3}
    assert {*codes.values()} == {0}, codes
    assert r"\u2211" in done.stdout  # of a document


def weights_of(folder):
    return SentenceTransformer(str(folder), device="cpu").state_dict()


LONG = (*TRAIN, "--max-steps", 8, "--save-steps", 3, "--learning-rate", 1e-3)
DYING = """
import os, resource, signal, sys
from sentence_transformers import SentenceTransformerTrainer as Trainer
step = Trainer.training_step
def training_step(self, *args, **kwargs):
    if self.state.global_step == 5 and os.environ.get("RANK") != "0":
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))  # no file beyond 16 KiB
    return step(self, *args, **kwargs)
Trainer.training_step = training_step
from st_magnitude.workbench.commands.app import app
app(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def whole(place):
    """The weights of a run that nothing disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert invoke(*LONG, "--output", "whole").exit_code == 0
    return weights_of(place / "whole")


@pytest.mark.parametrize("fault", ["killed", "disk full"])
def test_a_run_that_dies_loses_what_was_not_saved(place, whole, tmp_path, monkeypatch, fault):
    """Resumed after SIGKILL, or on a disk that was full, the weights are those of a whole run."""
    monkeypatch.chdir(place)
    output = ("--output", tmp_path / "died")
    code = -signal.SIGKILL if fault == "killed" else 2
    died = forked("-c", DYING, fault, *LONG, *output, code=code, cwd=place)
    if fault == "disk full":
        assert "checkpoint with --resume" in " ".join(died.stderr.split())
        assert "Traceback" not in died.stderr
    assert not (tmp_path / "died" / "modules.json").exists()
    assert (tmp_path / "died" / WORK / "checkpoint-3" / "trainer_state.json").exists()
    resumed = invoke(*LONG, *output, "--resume")
    assert resumed.exit_code == 0, resumed.stderr[-2000:]
    torch.testing.assert_close(weights_of(tmp_path / "died"), whole, rtol=0, atol=0)


ACCELERATE = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
ACCELERATE += " --mixed_precision no --dynamo_backend no --main_process_port 0"
LAUNCHERS = {"torchrun": TWO_RANKS, "accelerate": ACCELERATE.split()}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script(place, tmp_path, launcher):
    (block,) = [x for x in python_blocks(ROOT / "docs" / "train.md") if "def main" in x]
    say = "    print(f'processes {trainer.args.world_size};')\n"
    script = block.replace(HUB_ID, str(place / "model")).replace(
        "report_to=[]", "report_to=[], use_cpu=True"
    )
    script = script.replace("    trainer.save_model", say + "    trainer.save_model")
    script += "    import time\n\n    time.sleep(1)  # for gloo's threads, see the page\n"
    (tmp_path / "train.py").write_text(script)
    done = python(*LAUNCHERS[launcher], "train.py", cwd=tmp_path)
    assert re.findall(r"processes (\d);", done.stdout) == ["2", "2"]
    trained = SentenceTransformer(str(tmp_path / "my-retriever"), device="cpu")
    assert trained.similarity_fn_name == "cosine"


RANKS = ["train", "--data", "data", "--model", "model", "--loss", "learnable"]
RANKS += ["--batch-size", "2", "--max-steps", "6", "--save-steps", "2", "--json"]
WATCHED = """
import atexit, sys
from pathlib import Path
from st_magnitude.workbench.commands.app import app

def show_threads():
    names = {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
    print("threads:", names, file=sys.stderr)

atexit.register(show_threads)
app()
"""


def on_two_ranks(*arguments, **options):
    """What torchrun starts, by forks."""
    with socket.create_server(("localhost", 0)) as server:
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    ranks = [place | {"RANK": x, "LOCAL_RANK": x, "WORLD_SIZE": "2"} for x in "01"]
    with ThreadPoolExecutor(2) as pool:
        run = partial(forked, *arguments, **options)
        return list(pool.map(lambda rank: run(environment=rank), ranks))


def assert_gloo_has_ended(done):
    """A thread of gloo that runs into the interpreter's end may abort the process."""
    threads = re.findall("threads: .*", done.stderr)
    assert len(threads) == 2
    assert "gloo" not in " ".join(threads)


def test_the_command_prints_once_and_goes_on_after_a_kill(place):
    (place / "command.py").write_text(WATCHED)
    whole = python(*TWO_RANKS, "command.py", *RANKS, "--output", "ranks", cwd=place)
    assert_gloo_has_ended(whole)
    assert json.loads(whole.stdout)["steps"] == 6  # one line of JSON, of one process
    record = json.loads((place / "ranks" / "training.json").read_text())
    assert record["processes"] == 2
    assert record["gather_across_devices"] is True

    killed = (*RANKS, "--output", "killed")
    died = on_two_ranks("-c", DYING, "killed", *killed, code=None, cwd=place)
    assert died[0].returncode > 0
    assert died[1].returncode == -signal.SIGKILL
    assert (place / "killed" / WORK / "checkpoint-4").exists()
    assert not (place / "killed" / "modules.json").exists()
    on_two_ranks(*COMMAND, *killed, "--resume", cwd=place)
    expected, found = (stm.load(place / name, device="cpu") for name in ("ranks", "killed"))
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
