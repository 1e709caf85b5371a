"""What do you deploy: BM25, the table, both with a weight, or an encoder as published?

    python benchmarks/studies/known/decision.py FOLDER
    python benchmarks/studies/known/decision.py table

Six files of `defaults.sources` and one without anything to learn, at most 1,500 rows each, judged
with all defaults of `train` for wordllama's table in five folds, next to all-MiniLM-L6-v2 as it was
published. The same searches are judged again by a plain loop: nDCG@10 by pytrec_eval, BM25's tokens
and the weight (0, .1, ..., 1) chosen by it on the other folds. Every file is a line of
decision.jsonl.

Expected before the runs: the weight is level with or above fusion by rank (RRF, k = 60) everywhere,
by ten points and more where BM25 is weak (names of intents); what the loop finds is what `train`
says, to 1e-9; the file without anything to learn gets BM25 or the pretrained model.
"""

import argparse
import json
import logging
import tempfile
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytrec_eval
from benchmarks.data.docstrings import bundled_minilm
from benchmarks.studies.known.defaults import sources
from benchmarks.studies.known.null import shuffled

import st_magnitude as stm
from st_magnitude.evaluation.lexical import reciprocal_rank_fusion
from st_magnitude.judge import judge
from st_magnitude.workbench.finetune import run as training
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging.controls import CLASSIFIER
from st_magnitude.workbench.judging.folds import folds_of
from st_magnitude.workbench.judging.verdict import verdict_of

FILE = Path(__file__).with_suffix(".jsonl")
MOST_ROWS = 1_500
Run = dict[str, dict[str, float]]


def files(folder: Path) -> dict[str, list[dict[str, object]]]:
    rng = np.random.default_rng(0)
    found = {}
    for name, rows in sources(folder).items():
        found[name] = [rows[i] for i in rng.permutation(len(rows))[:MOST_ROWS]]
    pairs = [(str(row["text"]), str(row["intent"])) for row in found["BANKING77"]]
    return found | {"shuffled names": [dict(row) for row in shuffled(pairs, 0)]}


def by_trec(ranking: Run, qrels: dict[str, dict[str, int]]) -> dict[str, float]:
    """nDCG@10 of every query, with ranks in place of scores, as trec_eval breaks ties otherwise."""
    run = {q: {d: -float(i) for i, d in enumerate(of)} for q, of in ranking.items() if of}
    found = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    return {query: found.get(query, {}).get("ndcg_cut_10", 0.0) for query in qrels}


def summed(model: Run, bm25: Run, weight: float, unit: float) -> Run:
    """The weighted sum of scores; 0 and 1 are BM25 and the model alone."""
    if weight in (0.0, 1.0):
        return model if weight else bm25
    scale = np.mean([max(scores.values()) for scores in bm25.values() if scores])
    found = {}
    for query in model:
        scores = {
            d: weight * model[query].get(d, 0.0) / unit
            + (1 - weight) * bm25[query].get(d, 0.0) / scale
            for d in model[query].keys() | bm25[query].keys()
        }
        found[query] = dict(sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:100])
    return found


def chosen(options: list[dict[str, float]], folds: list[set[str]]) -> dict[str, float]:
    """nDCG@10 of every query under the option that is best on the other folds, the first of equal
    ones."""
    found = {}
    for fold in folds:
        others = options[0].keys() - fold
        means = [round(float(np.mean([x[q] for q in others])), 12) for x in options]
        found |= {query: options[means.index(max(means))][query] for query in fold}
    return found


def measured(rows: list[dict[str, object]]) -> dict[str, object]:
    """The figures of `train`, and those of the loop, of one file."""
    given = []

    def spy(exam, models, **options):
        verdict = verdict_of(exam, models, **options)
        before, after, *also = models
        given.append((before, after, also, verdict.controls.lexical))
        return verdict

    splits = stm.load_splits(rows)
    config = TrainConfig(folds=5, keep_anyway=True)
    minilm = str(bundled_minilm())
    with patch.object(training, "verdict_of", spy), tempfile.TemporaryDirectory() as work:
        model = stm.load("wordllama", device="cpu")
        verdict = train(model, splits, Path(work, "out"), config, also=[minilm]).verdict
    before, after, (encoder,), lexical = given[0]
    data = after.ranking.data
    qrels = {q: dict(grades) for q, grades in data.relevant.items() if q in after.ranking}
    folds = folds_of(data, 5, 0)
    runs = {tokens: {q: ranking[q] for q in qrels} for tokens, ranking in lexical.items()}
    loop = {tokens: by_trec(run, qrels) for tokens, run in runs.items()}
    loop["BM25"] = chosen(list(loop.values()), folds) if loop else dict.fromkeys(qrels, 0.0)
    for name, system in (("pretrained", before), ("trained", after), ("MiniLM", encoder)):
        run = {q: system.ranking[q] for q in qrels}
        loop[name] = by_trec(run, qrels)
        unit = 1.0 if system.exponent == 1.0 else np.mean([max(of.values()) for of in run.values()])
        weights = product(runs.values(), (round(0.1 * i, 1) for i in range(11)))
        fused = [by_trec(summed(run, bm25, w, unit), qrels) for bm25, w in weights]
        if fused:
            loop[f"{name} + BM25"] = chosen(fused, folds)
            by_rank = reciprocal_rank_fusion([run, runs["words"]], top_k=100)
            loop[f"{name}, RRF"] = by_trec(by_rank, qrels)
    weighed = [row for row in verdict.rows if row.name != CLASSIFIER]
    ours = [row.ndcg for row in weighed if "(not saved)" not in row.name]
    theirs = [np.mean(list(loop[name].values())) for name in ("pretrained", "trained")]
    systems = ["BM25", "pretrained + BM25", "trained + BM25", "MiniLM", "MiniLM + BM25"]
    theirs += [np.mean(list(loop[name].values())) for name in systems[: len(ours) - 2]]
    if not lexical:
        theirs = [*theirs[:2], np.mean(list(loop["MiniLM"].values()))]
    error = float(np.abs(np.subtract(ours, theirs)).max())
    gain = gain_of(loop, "trained + BM25", "trained, RRF") if lexical else None
    decision = verdict.decision  # None, if no search finds more than chance does
    return {
        "queries": verdict.queries,
        "ndcg": {name: round(float(np.mean(list(x.values()))), 5) for name, x in loop.items()},
        "largest difference to the loop": error,
        "over RRF": gain,
        "deploy": str(decision and decision.name).replace(minilm, "MiniLM"),
        "how": str(decision and decision.how),
        "lead": str(decision and decision.lead),
        "training": None if verdict.training is None else str(verdict.training),
    }


def gain_of(loop: dict[str, dict[str, float]], name: str, other: str) -> str:
    return str(judge([loop[name][q] - loop[other][q] for q in loop[name]]))


def table() -> list[str]:
    names = ["words", "4-grams", "pretrained", "pretrained + BM25", "trained", "trained, RRF"]
    names += ["trained + BM25", "MiniLM", "MiniLM + BM25"]
    lines = [
        f"| file | queries | {' | '.join(names)} | deploy |",
        "| --- " * (len(names) + 3) + "|",
    ]
    for line in FILE.read_text().splitlines():
        cell = json.loads(line)
        ndcg = [f"{cell['ndcg'][x]:.3f}" if x in cell["ndcg"] else "" for x in names]
        row = [cell["file"], f"{cell['queries']:,}", *ndcg, cell["deploy"]]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    given = parser.parse_args()
    if given.folder == "table":
        print("\n".join(table()))
        return
    logging.disable(logging.WARNING)
    for name, rows in files(Path(given.folder)).items():
        cell = {"file": name, **measured(rows)}
        with FILE.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        print(cell, flush=True)


if __name__ == "__main__":
    main()
