"""The runs that README and docs/start.md print, stored once.

    python benchmarks/data/faq.py
    python benchmarks/studies/runs.py      # ten minutes; then copy what changed into the pages

Each line of runs.jsonl is a command with what it printed at 80 columns, but for the texts of the
file, and the digest of its data. `unknown_lines` finds what a page prints and no run did.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from benchmarks.data.cache import cache_folder

DATA = "--data faq.csv --columns query=q,document=a"
COMMANDS = (
    f"st-magnitude train {DATA} --output my-retriever --confirm test",
    f'st-magnitude search my-retriever {DATA} "do I need permission for a new roof?"',
    f"st-magnitude compress my-retriever {DATA}",
)
RUNS = Path(__file__).with_name("runs.jsonl")
BLOCK = re.compile(r"^```text\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def unknown_lines(page: Path) -> list[str]:
    """Lines with a figure, in the blocks of output of a page, that no stored run printed."""
    printed: set[str] = set()
    for line in RUNS.read_text(encoding="utf-8").splitlines():
        printed.update(json.loads(line)["output"])
    text = page.read_text(encoding="utf-8")
    return [line for line in figures_of("".join(BLOCK.findall(text))) if line not in printed]


def without_texts(line: str) -> str:
    """A line of output without a text of the file."""
    hit = re.match(r" *\d+  \d\.\d{4}  ", line)
    return hit[0].rstrip() if hit else line.rstrip()


def figures_of(output: str) -> list[str]:
    """The lines of an output that have a figure, without the texts of the file, which are indented:
    a hit of a search is known by its rank and score."""
    lines = [line for line in output.splitlines() if re.search(r"\d", line)]
    return [without_texts(line) for line in lines if not re.match(r" +[^\d ]", line)]


def main() -> None:
    source = cache_folder() / "faq" / "zaragoza_construction_faq" / "data" / "faq-en.csv"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "faq.csv").write_bytes(source.read_bytes())
        for command in COMMANDS:
            found = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                env=os.environ | {"COLUMNS": "80"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            output = figures_of(found.stdout)
            lines.append(json.dumps({"command": command, "data": digest, "output": output}))
    RUNS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
