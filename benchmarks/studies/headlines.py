"""Sentences with a figure of a table: do they say what the table has?

Tables stand on the pages of docs/research/, where `tables.py` compares those between fences with
the cells. `headlines` has, for each page, regular expressions with one group, and the text that
the group should have by these tables. `contradicted` finds the sentences that say something else.
"""

from __future__ import annotations

import re
from functools import cache

from benchmarks.studies.archive import ROOT

Row = dict[str, str]


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def table(study: str, *columns: str) -> list[Row]:
    """The rows of the first table of a study that has these columns, by the heads of columns."""
    text = text_of(f"docs/research/{study}.md")
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, _, *rows = ([x.strip() for x in line.split("|")[1:-1]] for line in block.splitlines())
        if set(columns) <= set(head):
            return [dict(zip(head, row, strict=True)) for row in rows]
    raise ValueError(f"{study} has no table with {columns}")


def first(cell: str) -> float:
    """The first number of a cell such as "+4.2 [+3.2, +5.4]"."""
    return float(cell.split()[0])


def size(cell: str) -> str:
    """The same without its sign, as it is written."""
    return cell.split()[0].strip("+-")


def below_0(cells: list[str]) -> bool:
    """Whether the lower ends of all intervals are."""
    return all(float(cell.partition("[")[2].partition(",")[0]) <= 0 for cell in cells)


@cache
def headlines() -> dict[str, list[tuple[str, str]]]:
    encoders = [(x["data"], x["processor s"].split(" / ")) for x in table("kernel", "ratio by run")]
    ratios = [(data, float(mnrl) / float(other)) for data, (mnrl, other) in encoders]
    repeated = [x for data, x in ratios if data == "BANKING77"]  # 10,003 questions on 77 texts
    others = [x for data, x in ratios if data != "BANKING77"]

    pages = {x["test, model"]: x for x in table("magnitude", "definitions alone")}
    cosine, prompts = pages["WordNet, Cosine"], pages["WordNet, Cosine with prompts"]
    of_prompts = first(prompts["with all"]) - first(cosine["with all"])
    gains = table("magnitude", "in domain, matched")
    worst = min(first(x[k]) for x in gains for k in ("in domain, matched", "out, matched"))
    tuned = [x for x in table("magnitude", "study", "FOLDOC") if x["scoring"] == "matched"]
    of_encoders = [x for x in tuned if not x["study"].startswith("static")]
    in_domain, foldoc = (min(first(x[k]) for x in of_encoders) for k in ("in domain", "FOLDOC"))
    before = {x["base, trained on"]: x for x in table("magnitude", "before", "Dot")}
    learned = {base: x["QNorm"] for base, x in before.items()}
    literal = [x for x in table("magnitude", "logits") if x["loss"] == "QNorm"]  # 20 · s, auto
    mixed = [x for x in table("magnitude", "loss", "XQuAD, as trained") if "QNorm" in x["loss"]]
    as_trained = [x for x in mixed[0] if "as trained" in x], list(literal[0])[2:]
    of_20 = [
        first(at_auto[x]) - first(at_20[x])
        for names, (at_20, at_auto) in zip(as_trained, (mixed, literal), strict=True)
        for x in names
    ]
    outside = pages["FOLDOC, Cosine"]["QNorm as trained less this"]
    alone = {name: first(x["definitions alone"]) for name, x in pages.items()}
    behind = alone["WordNet, Cosine"] - alone["WordNet, QNorm as trained"]
    of_surface, of_prompt = (
        alone["FOLDOC, Cosine"] - alone[f"FOLDOC, Cosine {x}"]
        for x in ("+ surface prior", "with prompts")
    )
    of_docstrings = {k: v["QNorm"] for k, v in before.items() if k.endswith("docstrings")}
    positive = sum(first(x) > 0 for x in of_docstrings.values())

    texts = {x["texts, loss"]: x["quarter"] for x in table("compression", "texts, loss")}
    sum_over_01 = texts["all four, TempAgg - τ 0.1"]
    begun = [x["encoder - table"] for x in table("known", "encoder - table")]
    clear = [first(x) for x in begun if not below_0([x])]

    revela = {x["setting"]: x for x in table("revela", "over its start")}
    infonce = revela["InfoNCE"]["over Revela"]
    none, ours, large = table("norms", "over weight 0")[:3]  # by the weight of SIGReg
    change = "rises" if large["IsoScore"] > none["IsoScore"] else "falls"
    times = {10: "ten"}[int(large["weight"]) // int(ours["weight"])]
    directions = table("norms", "all - these")
    every = [x["over weight 0"] for x in directions if x["directions"] == "all"]
    sixteen = [first(x["all - these"]) for x in directions if x["directions"] == "16"]
    ways = {x["map, way"]: x["accuracy"] for x in table("norms", "map, way")}
    over_plain = [x for x in ways.values() if "[" in x]
    clip = {x["unseen style"]: x for x in table("clip", "cos I→T")}["nonorm-i2t"]
    of_dot = first(clip["dot I→T"]) - first(clip["cos I→T"])
    steps = re.findall(r'"--steps", type=int, default=(\d+)', text_of("examples/norms.py"))

    return {
        "README.md": [
            (r"retriever (\S+ to \S+) times as fast", f"{min(others):.1f} to {max(others):.1f}"),
            (r"or (\S+) times if texts repeat", f"{max(repeated):.1f}"),
            (r"as written, `scale=20`, cost up to (\d+) points more", f"{max(of_20):.0f}"),
            (r"QNorm gained (\d+) points", f"{first(cosine['QNorm as trained less this']):.0f}"),
            (r"\(prompts (\d+)\)", f"{of_prompts:.0f}"),
            (r"\), (\w+) outside; elsewhere", "none" if below_0([outside]) else "some"),
            (r"QNorm tied, or lost up to (\d+) \|", f"{-worst:.0f}"),
            (r"a fixed 0.1 does (as well) there", "as well" if below_0([sum_over_01]) else "worse"),
            (r"the same text is (\d+) points ahead", f"{first(infonce):.0f}"),
            (r"isotropy (\w+ at \w+) times our default weight", f"{change} at {times}"),
            (r"; (\w+) clear gain in ranking", "no" if below_0(every) else "a"),
            (r"\| (\w+) clear gain over a tuned", "no" if below_0(over_plain) else "a"),
        ],
        "docs/start.md": [
            (r"it was (\S+ to \S+) points behind", f"{min(clear):.0f} to {max(clear):.0f}"),
        ],
        "docs/losses.md": [
            (r"encoders \[up to (\S+) points", f"{-in_domain}"),
            (r"domain, and (\S+) in another\]", f"{-foldoc}"),
            (r"static models \[up to (\d+)\]", f"{-worst:.0f}"),
        ],
        "docs/papers.md": [
            (r"16 directions \[cost about (\d+) points", f"{sum(sixteen) / len(sixteen):.0f}"),
            (r"cut-init lost (\S+) points", size(ways["two layers, cut-init 3"])),
            (r"and (\S+) at c = 9", size(ways["two layers, cut-init 9"])),
            (r"GradScale was level, or (\S+) to", size(ways["linear, GradScale"])),
        ],
        "docs/revela.md": [
            (r"pairs was (\d+) points ahead after 48", f"{first(infonce):.0f}"),
        ],
        "docs/research/revela.md": [
            (r"contrastively gain (\S+) points", size(revela["Revela"]["over its start"])),
            (r"chunks is (\S+) points ahead", size(infonce)),
        ],
        "docs/research/magnitude.md": [
            (r"MiniLM: d = (\S+) \| reproduced on", learned["MiniLM, docstrings"]),
            (r"reproduced on (\w+) of four bases", {2: "two"}.get(positive, "other")),
            (r"except LM table: (\S+) \|", learned["LM table, WordNet"]),
            (r"all pages, and (\S+) points behind without", f"{behind:.1f}"),
            (r"costs (\S+) points there on definitions alone", f"{of_surface:.1f}"),
            (r"definitions alone, prompts (\S+)\. So", f"{of_prompt:.1f}"),
            (r"trained on WordNet: d = (\S+)", learned["MiniLM, WordNet"]),
            (r"static, FOLDOC: ([^|]*\]) \| not", tuned[0]["FOLDOC"]),
            (r"\| MiniLM, FOLDOC: ([^|]*\])", tuned[-1]["FOLDOC"]),
            (r"MiniLM, WordNet: ([^|]*\])", tuned[-1]["in domain"]),
            (r"LM table, WordNet, other domains: ([^|]*\])", gains[2]["out, matched"]),
            (r"random, WordNet, other domains: ([^|]*\])", gains[4]["out, matched"]),
            (r"MiniLM, 40 steps, other domains: ([^|]*\])", gains[6]["out, matched"]),
        ],
        "docs/research/clip.md": [
            (r"nonorm-i2t, with (\S+) ±", f"{of_dot:+.1f}"),
        ],
        "docs/research/norms.md": [
            (r"and with QNorm for (\d+) steps", *steps),
        ],
    }


def contradicted(page: str, text: str) -> list[str]:
    """The sentences of a page that do not say what the tables have."""
    words = " ".join(text.split())
    found = []
    for pattern, expected in headlines().get(page, []):
        said = re.findall(pattern, words)
        if said != [expected]:
            found.append(f"{pattern!r} has {said}, the table {expected!r}")
    return found
