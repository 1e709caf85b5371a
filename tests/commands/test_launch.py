"""The recipes of docs/devices.md: two gloo processes, started by torchrun and by accelerate
launch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from test_cli_processes import DYING, fill
from test_docs import HUB_ID, ROOT, python_blocks

import st_magnitude as stm

pytestmark = pytest.mark.slow
ACCELERATE = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
ACCELERATE += " --mixed_precision no --dynamo_backend no --main_process_port 0"
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": ACCELERATE.split(),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return fill(tmp_path)


def launch(launcher: str, place: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *LAUNCHERS[launcher], *arguments]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "timeout": 300}  # sums in one order
    return subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script(place, launcher):
    (block,) = python_blocks(ROOT / "docs" / "devices.md")
    say = "    print(f'processes {trainer.args.world_size};')\n"
    script = block.replace(HUB_ID, str(place / "model")).replace(
        "report_to=[],", "report_to=[], use_cpu=True,"
    )
    script = script.replace("    trainer.save_model", say + "    trainer.save_model")
    script += "    import time\n\n    time.sleep(1)  # for gloo's threads, see the page\n"
    (place / "train.py").write_text(script)
    done = launch(launcher, place, "train.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"processes (\d);", done.stdout) == ["2", "2"]
    trained = SentenceTransformer(str(place / "my-retriever"), device="cpu")
    assert trained.similarity_fn_name == "dot"


TRAIN = ["train", "--data", "data", "--model", "model", "--loss", "learnable"]
TRAIN += ["--batch-size", "2", "--max-steps", "6"]
TRAIN += ["--save-steps", "2", "--json"]
COMMAND = """
import atexit, sys
from pathlib import Path
from st_magnitude.commands.app import app

def show_threads():
    names = {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
    print("threads:", names, file=sys.stderr)

atexit.register(show_threads)
app()
"""


def assert_gloo_has_ended(done: subprocess.CompletedProcess) -> None:
    """A thread of gloo that runs into the interpreter's end may abort the process."""
    threads = re.findall("threads: .*", done.stderr)
    assert len(threads) == 2
    assert "gloo" not in " ".join(threads)


def test_the_command_prints_once_and_goes_on_after_a_kill(place):
    (place / "command.py").write_text(COMMAND)
    whole = launch("torchrun", place, "command.py", *TRAIN, "--output", "whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert_gloo_has_ended(whole)
    assert json.loads(whole.stdout)["steps"] == 6  # one line of JSON, of one process
    record = json.loads((place / "whole" / "training.json").read_text())
    assert record["processes"] == 2
    assert record["gather_across_devices"] is True

    (place / "dying.py").write_text(DYING)
    died = launch("torchrun", place, "dying.py", "killed", *TRAIN, "--output", "killed")
    assert died.returncode != 0
    assert (place / "killed" / "checkpoints" / "checkpoint-4").exists()
    assert not (place / "killed" / "modules.json").exists()
    again = ("-m", "st_magnitude", *TRAIN, "--output", "killed", "--resume")
    resumed = launch("torchrun", place, *again)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    expected, found = (stm.load(place / name, device="cpu") for name in ("whole", "killed"))
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_revela(place):
    (place / "command.py").write_text(COMMAND)
    command = "revela --corpus texts --data data --retriever model --lm lm --output out --json"
    command += " --group-size 2 --max-words 8 --max-steps 2 --batch-size 1 --lora-rank 2"
    done = launch("torchrun", place, "command.py", *command.split(), "--max-length", "16")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_gloo_has_ended(done)
    figures = json.loads(done.stdout)
    assert figures["processes"] == 2
    assert {"before", "after", "differences"} <= figures.keys()
    assert (place / "out" / "modules.json").exists()
