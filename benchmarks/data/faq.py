"""Two files of questions and answers, from packages of Debian and PyPI.

    python benchmarks/data/faq.py        # fetches them with apt-get and pip into the cache

- "software": the FAQs of Perl (perl-doc, GPL or Artistic) and of Python (python3.11-doc, PSF).
- "construction": 500 questions on building in Sweden (zaragoza-construction-faq, CC BY 4.0).
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.data.cache import cache_folder

__all__ = ["read"]

DEBIAN = ("perl-doc", "python3.11-doc")
PYPI = "zaragoza-construction-faq==1.2.1"
Pairs = list[tuple[str, str]]


def read(name: str) -> Pairs:
    """The questions of a file with their answers.

    Raises:
        FileNotFoundError: If the packages were not fetched.
    """
    folder = cache_folder() / "faq"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: run python benchmarks/data/faq.py.")
    found = software(folder) if name == "software" else construction(folder)
    return [(query, answer) for query, answer in found if query and answer]


def software(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.glob("usr/share/perl/*/pod/perlfaq[1-9].pod")):
        text = file.read_text(encoding="utf-8").partition("\n=head1 AUTHOR")[0]
        for part in re.split(r"^=head2 ", text, flags=re.MULTILINE)[1:]:
            query, _, answer = part.partition("\n")
            answer = re.sub(r"^=.*$|^\(contributed by .*?\)", "", answer, flags=re.MULTILINE)
            yield plain(query), plain(answer)
    for file in sorted(folder.glob("usr/share/doc/python3.11/html/_sources/faq/*.rst.txt")):
        text = file.read_text(encoding="utf-8")
        parts = re.split(r"^(\S.*)\n-{4,}\n", text, flags=re.MULTILINE)[1:]
        for query, answer in zip(parts[::2], parts[1::2], strict=True):
            answer = re.split(r"^\S.*\n={4,}\n", answer, flags=re.MULTILINE)[0]
            yield plain(query), plain(re.sub(r"^\.\. .*$", "", answer, flags=re.MULTILINE))


def construction(folder: Path) -> Iterator[tuple[str, str]]:
    file = folder / "zaragoza_construction_faq" / "data" / "faq-en.csv"
    with file.open(encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            yield row["q"], row["a"]


def plain(text: str) -> str:
    """A text without the marks of pod and reStructuredText, in one line."""
    text = re.sub(r"\bX<[^>]*>", "", text)
    text = re.sub(r"\b[BCEFIL]<+\s?([^<>]*?)\s?>+", r"\1", text)
    text = re.sub(r":[\w:]+:`([^`]*)`", r"\1", text)
    return " ".join(re.sub(r"``?|\*\*", "", text).split())


def main() -> None:
    folder = cache_folder() / "faq"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBIAN], cwd=folder, check=True)
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", file.name, "."], cwd=folder, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), PYPI]
    subprocess.run(pip, check=True)


if __name__ == "__main__":
    main()
