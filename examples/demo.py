"""The five commands of docs/start.md, on the docstrings of your own environment.

    make demo                                  # or:
    pip install -e ".[dev]"
    python examples/demo.py --output runs/demo

It writes a file of pairs: the summary of a docstring as a question, and the name with a paragraph
of the description as an answer. Each command is shown before it runs, and the last lines say what
to deploy.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _data import build_docstring_task

from st_magnitude.result import wrap
from st_magnitude.workbench.judging.choice import Decision

PACKAGES = ("matplotlib", "numpy", "polars", "sympy")
MORE = ("networkx", "pandas", "scipy", "sklearn")  # from which the builder makes its dev and test
SPLITS = ("train", "dev", "train", "test", "dev", "train", "train", "dev", "test", "train")
LONGEST = 300  # characters of an answer, for the time of the encoder
SERVE = Path(__file__).resolve().with_name("serve.py")


def write_pairs(path: Path, size: int) -> str:
    """Writes pairs from this number of files of each package, with about as many questions."""
    most = {"train_queries": 4 * size, "dev_queries": size, "test_queries": 3 * size}
    task = build_docstring_task(PACKAGES, **most, max_files=size)
    found = [
        (name, data.queries[name], [data.corpus[key] for key in sorted(answers)])
        for data in (task.train, task.dev, task.test)
        for name, answers in data.relevant.items()
    ]
    random.Random(0).shuffle(found)  # packages are in all splits, as in a file that a user has
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "document", "split"])
        for i, (name, question, answers) in enumerate(found):
            parts = name.split(".")
            short = ".".join(dict.fromkeys([parts[0], parts[-1]]))
            split = SPLITS[i % len(SPLITS)]
            writer.writerows([question, f"{short}: {text}"[:LONGEST], split] for text in answers)
    return f"{path}: {len(found):,} questions about {', '.join(sorted(PACKAGES + MORE))}"


class Commands:
    """Runs commands in a folder, and shows each before its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.perf_counter()

    def show(self, title: str, *command: str) -> None:
        seconds = time.perf_counter() - self.began
        lines = textwrap.wrap(f"$ {shlex.join(command)}", 78, subsequent_indent="    ")
        shown = " \\\n".join(lines)
        print(f"\n{title} [{seconds:.0f} s]\n{shown}\n", flush=True)

    def run(self, title: str, *arguments: str) -> None:
        """A command of st-magnitude; if it fails, the demo ends with its exit code."""
        self.show(title, "st-magnitude", *arguments)
        command = [sys.executable, "-m", "st_magnitude", *arguments]
        if code := subprocess.run(command, cwd=self.folder, check=False).returncode:
            sys.exit(code)

    @contextmanager
    def serving(self, title: str, model: str) -> Iterator[str]:
        """The URL of a server that runs within the block, at a port that is free."""
        self.show(title, "python", os.path.relpath(SERVE, self.folder), model, "--port", "0")
        command = [sys.executable, str(SERVE), model, "--port", "0"]
        # Ctrl-C reaches only the demo, which then stops the server
        alone = {"cwd": self.folder, "start_new_session": True}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **alone) as server:
            try:
                said = server.stdout.readline()
                if not said:
                    sys.exit(server.wait())
                print(said, end="")
                yield said.split()[-1]
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="new folder")
    parser.add_argument("--size", type=int, default=50, help="files of each package")
    parser.add_argument("--budget", default="2m", help="of the encoder, and of compare")
    options = parser.parse_args()
    output = options.output
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty: choose another --output, or remove it.")
    output.mkdir(parents=True, exist_ok=True)
    commands = Commands(output)
    print(wrap(write_pairs(output / "docs.csv", options.size)) + f"\n\n$ cd {output}")
    data = ("--data", "docs.csv")
    model = "my-retriever"
    budget = ("--budget", options.budget)
    commands.run("1. Train", "train", *data, "--output", model, "--confirm", "test", *budget)
    commands.run("2. Look", "search", model, *data, "how do I read a CSV file?")
    commands.run("3. Compare", "compare", *data, "--output", "compare", *budget)
    commands.run("4. Make it small", "compress", model, *data)
    with commands.serving("5. Serve", model) as url:
        commands.run("and check the server", "check-serving", url, "--model", model)
    seconds = time.perf_counter() - commands.began
    decision = Decision.load(output / model)
    files = f"In {output}: docs.csv, {model} and compare/compare.md. Next, with your own pairs:"
    said = wrap(str(decision or "Nothing is recommended."))
    print(f"\nThe decision [{seconds:.0f} s]\n{said}\n\n{wrap(files)}\n")
    command = os.path.relpath(Path(sys.executable).with_name("st-magnitude"))
    print(f"{command} train --data YOUR-PAIRS.csv --output {model}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # it stops what it started, as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
