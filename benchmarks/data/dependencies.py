"""Data in which some documents answer many more queries than others: what a package depends on.

The description of one of Debian's packages asks for the packages that it depends on. Read from the
lists of apt. Packages of one source are in one split, and dev and test ask for one
package of each. Nothing of the texts is part of the repository.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from benchmarks.data.debian import package_descriptions, package_lists
from benchmarks.studies.cells import SEED, fingerprint
from datasets import Dataset
from torch import Tensor

from st_magnitude.data.retrieval import RetrievalData

WORDS = 48  # of a description
FREQUENT = 50


@dataclass
class Task:
    """Rows to train on, a task for every choice and one for the figures.

    Attributes:
        anchors: The query of each pair of the training.
        positives: The document of each pair, by its id.
        corpus: Documents of the training by id; those of dev and test may be others.
        dev: For every choice.
        test: For the figures.
    """

    anchors: list[str]
    positives: list[str]
    corpus: dict[str, str]
    dev: RetrievalData
    test: RetrievalData

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
        return fingerprint([self.anchors, *texts])


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
    for text in package_lists("*_Packages*"):
        for block in text.split("\n\n"):
            fields = dict(re.findall(rf"^({'|'.join(wanted)}): (.*)$", block, re.M))
            if "Description" in fields:
                found.setdefault(fields["Package"], fields)
    return found


@lru_cache(maxsize=1)
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
    return Task([a for a, _ in pairs], [d for _, d in pairs], corpus, dev, test)
