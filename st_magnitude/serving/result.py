"""What `check_serving` returns."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass

from st_magnitude.result import to_plain

__all__ = ["Finding", "ServingCheck"]

WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One difference between what a target returns and what the model computes.

    Attributes:
        name: Short fixed name, such as ``"norms lost"``; docs/serving.md has the list.
        text: The difference with its figures.
        fix: What to change, with the switch of this server where it has one.
        matters: Whether scores by the model's similarity change; False for a note.
    """

    name: str
    text: str
    fix: str
    matters: bool = True

    def __str__(self) -> str:
        mark = f"[{self.name}] " if self.matters else f"[note: {self.name}] "
        lines = textwrap.wrap(mark + self.text, WIDTH, subsequent_indent=" " * 5, break_long_words=False)
        fix = textwrap.wrap(
            f"-> {self.fix}", WIDTH - 5, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
        )
        return "\n     ".join(["\n".join(lines), *(fix if self.fix else [])])


@dataclass(frozen=True)
class ServingCheck:
    """The result of `check_serving`. ``print(check)`` shows it in a terminal of 80 columns.

    Attributes:
        target: URL, or name of the callable.
        server: Name and version of the server, as far as it tells them.
        model: Hub id or folder of the model, as far as the model knows it.
        findings: Differences, the most important first; notes last.
        local_norms: Smallest and largest norm of the model's own embeddings of the probes.
        served_norms: Smallest and largest norm of what came back; nan for a search, which returns no vectors.
        num_queries: Number of queries whose rankings were compared.
        num_documents: Number of documents that they rank.
        changed_rankings: Number of queries whose top 10 differs by more than ties.
        error: Median relative error of a vector, after the differences that have a finding of their own.
        remark: What could not be checked, in a sentence; may be empty.
    """

    target: str
    server: str
    model: str
    findings: tuple[Finding, ...]
    local_norms: tuple[float, float]
    served_norms: tuple[float, float]
    num_queries: int
    num_documents: int
    changed_rankings: int
    error: float
    remark: str = ""

    @property
    def same(self) -> bool:
        """Whether the target serves what the model computes: there are no findings, or only notes."""
        return not any(finding.matters for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"There is no finding called {name!r}; there are {[f.name for f in self.findings]}.")

    def to_json(self) -> str:
        """All attributes and ``same`` as one JSON document."""
        return json.dumps(to_plain(self) | {"same": self.same}, allow_nan=False)

    def __str__(self) -> str:
        number = sum(finding.matters for finding in self.findings)
        verdict = "SAME to rounding" if self.same else f"DIFFERS: {number} difference{'s' * (number > 1)}"
        if self.same and self.findings:
            verdict = "SAME scores, with a note"
        server = f" ({self.server})" if self.server else ""
        local, served = ("{:.3f} to {:.3f}".format(*pair) for pair in (self.local_norms, self.served_norms))
        figures = [
            f"Norms: the model's {local}" + ("." if math.isnan(self.served_norms[0]) else f", the target's {served}."),
            f"Rankings: {self.changed_rankings} of {self.num_queries} queries rank the {self.num_documents} documents "
            "differently.",
            self.remark,
        ]
        return "\n\n".join(
            [
                "\n".join(map(_wrapped, [f"{self.target}{server} serves {self.model or 'the model'}?", verdict])),
                *map(str, self.findings),
                "\n".join(_wrapped(line) for line in figures if line),
            ]
        )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
