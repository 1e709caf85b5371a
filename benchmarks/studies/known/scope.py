"""Out-of-scope questions of CLINC150: which signal says when not to answer?

    python benchmarks/studies/known/scope.py --data FOLDER

Question -> name of its intent, 4,500 test questions and 1,000 that no name answers. 500 times
1,000 of them, drawn with replacement, choose a threshold; the share of wrong answers is over all
5,500. "Fitted" signals are logistic regressions on the validation questions, with 100 out of scope.
A run is a line of scope.jsonl.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import clinc150
from benchmarks.studies.known.known import BASES, header, row
from benchmarks.studies.known.training import Cell, base_model, data, trained
from benchmarks.studies.store import Figures, Store
from examples.abstention import choose_threshold
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import st_magnitude as stm


@dataclass(frozen=True)
class Model:
    """MiniLM "published", or trained with a loss."""

    name: str


CELLS = Store(Path(__file__).with_suffix(".jsonl"), Model)
RISK = 0.1
DRAWS = 500
FITTED = {"score, norm": [0, 2], "score, gap": [0, 1], "score, gap, norm": [0, 1, 2]}
Array = NDArray[np.float64]


def features(
    model: SentenceTransformer, splits: tuple[str, str], exponent: float, folder: Path
) -> tuple[Array, Array, Array]:
    """Score, gap and norm of queries, (n, 3); whether the answer is wrong; whether out of scope."""
    file = folder / "clinc150_full.json"
    questions = [x for split in splits for x in clinc150.read(file, split)]
    names = sorted({intent for _, intent in clinc150.read(file, "train")})
    options = {"convert_to_tensor": True, "batch_size": 256}
    queries = model.encode([text for text, _ in questions], **options)
    documents = model.encode([name.replace("_", " ") for name in names], **options)
    similarity = stm.Similarity(1.0, exponent)
    scores = similarity.query(queries) @ similarity.document(documents).T  # (n, 150)
    best, places = scores.topk(2)
    norms = queries.norm(dim=1)
    signals = torch.stack([best[:, 0], best[:, 0] - best[:, 1], norms], dim=1).double().numpy()
    right = np.array(
        [names[p] == x for p, (_, x) in zip(places[:, 0].tolist(), questions, strict=True)]
    )
    return signals, ~right, np.array([intent == "oos" for _, intent in questions])


def rules_of(
    model: SentenceTransformer, exponent: float, folder: Path
) -> dict[str, dict[str, float]]:
    """Of every rule: how often risk exceeds the promise, mean coverage and risk, and AUROC."""
    seen, seen_wrong, _ = features(model, ("val", "oos_val"), exponent, folder)
    found, wrong, out = features(model, ("test", "oos_test"), exponent, folder)
    signals = {"score": found[:, 0], "gap": found[:, 1], "norm of the query": found[:, 2]}
    for name, columns in FITTED.items():
        spread = seen[:, columns].std(axis=0)
        fit = LogisticRegression(C=100.0).fit(seen[:, columns] / spread, ~seen_wrong)
        signals[f"fitted: {name}"] = fit.decision_function(found[:, columns] / spread)
    thresholds: dict[str, list[float]] = {name: [] for name in signals}
    thresholds["score, empirical risk"] = []
    for draw in range(DRAWS):
        some = np.random.default_rng(draw).integers(len(found), size=1000)
        for name, values in signals.items():
            scores = np.stack([values[some], np.zeros(len(some))], axis=1)
            thresholds[name].append(choose_threshold(scores, wrong[some], RISK, 0.05)[1])
        order = some[np.argsort(-found[some, 0])]
        kept = np.cumsum(wrong[order]) <= RISK * np.arange(1, len(order) + 1)
        lowest = found[order[kept], 0].min(initial=math.inf)
        thresholds["score, empirical risk"].append(lowest)
    thresholds |= {f"score above {t}": [t] for t in (0.5, 0.7)} if exponent == 1 else {}
    rules = {}
    for name, tried in thresholds.items():
        values = signals[name] if name in signals else signals["score"]
        answered = [values >= t for t in tried]
        risks = np.array([wrong[a].mean() if a.any() else 0.0 for a in answered])
        rules[name] = {
            "auroc": roc_auc_score(~out, values),
            "broken": float((risks > RISK).mean()),
            "coverage": float(np.mean([a.mean() for a in answered])),
            "risk": float(risks.mean()),
        }
    return rules


def table() -> list[str]:
    """Of each model and rule."""
    known = {model.name: x["rules"] for model, x in CELLS.found.items()}
    rules = dict.fromkeys(name for found in known.values() for name in found)
    lines = [header("signal", *known)]
    for name in rules:
        shown = [
            "{auroc:.2f}, {broken:.0%}, {coverage:.2f}".format(**found[name])
            if name in found
            else ""
            for found in known.values()
        ]
        lines.append(row(name, *shown))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    torch.set_num_threads(1)
    one = Cell("clinc names", "Cosine", (0.05,), **BASES["MiniLM"])

    def measured(model: Model) -> Figures:
        if model.name == "published":
            encoder = stm.strip_normalize(base_model("MiniLM"))
        else:
            encoder, _ = trained(replace(one, loss=model.name), data(one.data, folder).rows)
        return {"rules": rules_of(encoder, 0.0 if model.name == "Dot" else 1.0, folder)}

    CELLS.run(measured, map(Model, ("published", "Cosine", "Dot")))


if __name__ == "__main__":
    main()
