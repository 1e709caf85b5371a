"""``st-magnitude demo``: teach a retriever the API docs of your own Python environment.

A pretrained model from PyPI is fine-tuned twice on the docstrings of the installed packages, with cosine similarity and
with QNorm, and measured before and after on packages that it was never fine-tuned on. Descriptions answer queries;
parameter lists, references and examples never do: they are explicit negatives in training and distractors in the index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude import geometry
from st_magnitude._plot import pyplot
from st_magnitude.commands.demo import DocstringTask, build_docstring_task, bundled_minilm
from st_magnitude.commands.train.config import TrainConfig
from st_magnitude.commands.train.run import train
from st_magnitude.corpus.beir import RetrievalData, save_beir
from st_magnitude.evaluation.calibration import calibrate_exponent
from st_magnitude.evaluation.metrics import ndcg, rank
from st_magnitude.similarity import COSINE, DOT, QNORM, Similarity
from st_magnitude.surgery.normalize import export, prepare
from st_magnitude.surgery.raw import encode_raw
from st_magnitude.training.trainer import has_fast_bf16

__all__ = ["Measurement", "measure", "run"]

Array = NDArray[np.float64]
Say = Callable[[str], None]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Encoded:
    """Raw embeddings of a task."""

    data: RetrievalData
    queries: Tensor  # (n, D)
    documents: Tensor  # (m, D)
    relevant: NDArray[np.bool_] = field(init=False)  # (n, m)

    def __post_init__(self) -> None:
        column = {d: j for j, d in enumerate(self.data.corpus)}
        self.relevant = np.zeros((len(self.data.queries), len(column)), dtype=bool)
        for i, query in enumerate(self.data.queries):
            self.relevant[i, [column[d] for d in self.data.relevant_docs[query]]] = True

    @property
    def answers(self) -> NDArray[np.bool_]:
        """(m,) Whether a document is relevant to any query."""
        return np.any(self.relevant, axis=0)

    @property
    def words(self) -> NDArray[np.int64]:
        """(m,) Length of the documents in words."""
        return np.array([len(text.split()) for text in self.data.corpus.values()])


def encode(model: SentenceTransformer, data: RetrievalData, batch_size: int = 64) -> Encoded:
    """Raw embeddings of queries and corpus."""
    queries = encode_raw(model, list(data.queries.values()), "query", batch_size, show_progress_bar=True)
    documents = encode_raw(model, list(data.corpus.values()), "document", batch_size, show_progress_bar=True)
    return Encoded(data, queries.float().cpu(), documents.float().cpu())


def ndcg_at_10(scores: Tensor, relevant: NDArray[np.bool_], index: NDArray[np.bool_] | None = None) -> Array:
    """Per-query nDCG@10, (n, m), (n, m) -> (n,), of an index that holds some of the documents (all of them: None).

    Relevant documents that are not in the index count as missed.
    """
    if index is not None:
        scores = scores.masked_fill(~torch.from_numpy(index), -torch.inf)
    top = rank(scores, 10).numpy()
    hits = np.take_along_axis(relevant if index is None else relevant & index, top, axis=1)
    return ndcg(hits, relevant.sum(axis=1), 10)


@dataclass
class Measurement:
    """What one model does on one task. nDCG values are per query, (n,)."""

    cosine: Array
    dot: Array
    matched: Array  # under the similarity it was trained with
    exponent: float  # of the document norm at read-out, chosen on other data
    chosen: Array  # nDCG at that exponent
    cohens_d: float  # norms of answers against norms of boilerplate
    cohens_d_without_length: float
    auc: float  # of the norm, for "answers any query"
    boilerplate_in_top_10: float  # share of the ten best, at the chosen exponent
    relevant_kept: float  # share of the answers among the half of the index with the larger norms
    pruned: Array  # nDCG at the chosen exponent with that half alone
    clean: Array  # nDCG at the chosen exponent with all boilerplate removed from the index
    norms: Array  # (m,)


def measure(encoded: Encoded, matched: Similarity, exponent: float) -> Measurement:
    """All figures of the table for raw embeddings.

    Args:
        encoded: Embeddings and judgements.
        matched: The similarity of training.
        exponent: The document exponent at read-out.
    """
    norms = geometry.norms(encoded.documents)
    chosen = Similarity(1.0, exponent)(encoded.queries, encoded.documents)
    answers = encoded.answers
    larger_half = np.zeros(len(norms), dtype=bool)
    larger_half[np.argsort(-norms, kind="stable")[: (len(norms) + 1) // 2]] = True
    return Measurement(
        cosine=ndcg_at_10(COSINE(encoded.queries, encoded.documents), encoded.relevant),
        dot=ndcg_at_10(DOT(encoded.queries, encoded.documents), encoded.relevant),
        matched=ndcg_at_10(matched(encoded.queries, encoded.documents), encoded.relevant),
        exponent=exponent,
        chosen=ndcg_at_10(chosen, encoded.relevant),
        cohens_d=geometry.cohens_d(norms[answers], norms[~answers]),
        cohens_d_without_length=geometry.adjusted_cohens_d(norms, np.log(encoded.words), answers),
        auc=geometry.auroc(norms[answers], norms[~answers]),
        boilerplate_in_top_10=float((~answers)[rank(chosen, 10).numpy()].mean()),
        relevant_kept=float(larger_half[answers].mean()),
        pruned=ndcg_at_10(chosen, encoded.relevant, larger_half),
        clean=ndcg_at_10(chosen, encoded.relevant, answers),
        norms=norms,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Controls: how much of it could be had without any training?
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Controls:
    """A classifier that sees only the surface of a chunk: its length, punctuation and capitals."""

    auc: float  # for "answers any query", on the test corpus
    correlation_with_norm: float  # Spearman, its logit against the norm of the QNorm model
    prior: Array  # nDCG of pretrained cosine + weight · log P(answer | surface)
    prior_weight: float  # chosen on dev


def surface_features(texts: list[str]) -> Array:
    """Length and punctuation: (n,) texts -> (n, 14)."""
    rows = []
    for text in texts:
        words, length = text.split(), max(len(text), 1)
        marks = [text.count(mark) / length for mark in ".,:;()[]`'\"=_/-"]
        shares = [
            sum(c.isdigit() for c in text) / length,
            sum(c.isupper() for c in text) / length,
            sum(len(w) for w in words) / max(len(words), 1),
        ]
        rows.append([np.log1p(len(words)), *shares, *marks, float(text[:1].isupper()), float(text.endswith("."))])
    return np.array(rows)


def run_controls(task: DocstringTask, pretrained: Mapping[str, Encoded], qnorm_norms: Array) -> Controls:
    """The classifier is trained on the chunks of the training packages, its weight beside cosine chosen on dev."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    answers = set().union(*task.train.relevant_docs.values())
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(surface_features(list(task.train.corpus.values())), [d in answers for d in task.train.corpus])

    def log_prior(encoded: Encoded) -> Tensor:
        features = surface_features(list(encoded.data.corpus.values()))
        return torch.from_numpy(classifier.predict_log_proba(features)[:, 1]).float()  # (m,)

    def score(encoded: Encoded, weight: float) -> Array:
        cosine = COSINE(encoded.queries, encoded.documents)
        return ndcg_at_10(cosine + weight * log_prior(encoded), encoded.relevant)

    dev, test = pretrained["dev"], pretrained["test"]
    weight = max((0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6), key=lambda w: score(dev, w).mean())
    logits = classifier.decision_function(surface_features(list(test.data.corpus.values())))
    return Controls(
        auc=geometry.auroc(logits[test.answers], logits[~test.answers]),
        correlation_with_norm=geometry.spearman(logits, qnorm_norms),
        prior=score(test, weight),
        prior_weight=weight,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Reporting
# ---------------------------------------------------------------------------------------------------------------------


def table(measured: Mapping[str, Measurement]) -> str:
    """The figures side by side, one model a column."""
    rows: list[tuple[str, Callable[[Measurement], str]]] = [
        ("nDCG@10, as trained", lambda m: f"{m.matched.mean():.3f}"),
        ("nDCG@10 by cosine", lambda m: f"{m.cosine.mean():.3f}"),
        ("nDCG@10 by dot", lambda m: f"{m.dot.mean():.3f}"),
        ("document exponent, chosen on dev", lambda m: f"{m.exponent:.2f}"),
        ("nDCG@10 at that exponent", lambda m: f"{m.chosen.mean():.3f}"),
        ("  boilerplate among the top 10", lambda m: f"{m.boilerplate_in_top_10:.0%}"),
        ("Cohen's d of norms, answer - boilerplate", lambda m: f"{m.cohens_d:+.2f}"),
        ("  with length regressed out", lambda m: f"{m.cohens_d_without_length:+.2f}"),
        ("AUC of the norm for 'is an answer'", lambda m: f"{m.auc:.3f}"),
        ("index halved by norm: answers kept", lambda m: f"{m.relevant_kept:.0%}"),
        ("  nDCG@10 of that half", lambda m: f"{m.pruned.mean():.3f}"),
        ("nDCG@10 with all boilerplate removed", lambda m: f"{m.clean.mean():.3f}"),
    ]
    width = max(len(label) for label, _ in rows)
    lines = ["".ljust(width) + "".join(f"{name:>12}" for name in measured)]
    lines += [label.ljust(width) + "".join(f"{value(m):>12}" for m in measured.values()) for label, value in rows]
    return "\n".join(lines)


def comparison(name: str, a: Array, b: Array) -> str:
    """One line on the paired difference of two per-query scores."""
    gain, low, high = geometry.paired_bootstrap(a, b)
    verdict = "a tie" if low <= 0 <= high else ("better" if gain > 0 else "worse")
    return f"{name}: {gain:+.3f} [{low:+.3f}, {high:+.3f}] nDCG@10, {verdict}"


def plot_norms(measured: Mapping[str, Measurement], answers: NDArray[np.bool_], path: Path) -> None:
    """Histograms of document norms, answers against boilerplate, one panel a model."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(measured), figsize=(4 * len(measured), 3.4), sharey=True, layout="constrained")
    for axis, (name, m) in zip(np.atleast_1d(axes), measured.items(), strict=True):
        bins = np.linspace(m.norms.min(), m.norms.max(), 41).tolist()
        axis.hist(m.norms[~answers], bins=bins, alpha=0.65, color="#9a9a9a", label="boilerplate, never relevant")
        axis.hist(m.norms[answers], bins=bins, alpha=0.65, color="#1f6fb4", label="answers to some query")
        axis.set_title(f"{name}: d = {m.cohens_d:+.2f}, AUC = {m.auc:.2f}", fontsize=10)
        axis.set_xlabel("norm of the document embedding")
        axis.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(axes)[0].set_ylabel("documents")
    np.atleast_1d(axes)[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# The job
# ---------------------------------------------------------------------------------------------------------------------


def run(
    output: str | Path,
    model: str | None = None,
    steps: int = 60,
    batch_size: int = 32,
    learning_rate: float = 5e-5,
    max_length: int = 64,
    seed: int = 0,
    task: DocstringTask | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Builds the data, trains twice, measures, saves, and has mteb score the saved model in a fresh process.

    Args:
        output: A new or empty folder for models, data, ``norms.png`` and ``results.json``.
        model: A SentenceTransformer folder or hub id; default: all-MiniLM-L6-v2 from PyPI.
        steps: Training steps of each of the two models.
        batch_size: Queries a step, each with its answer and one explicit negative.
        learning_rate: Peak rate.
        max_length: Tokens of a text that the model reads.
        seed: Of the data, the order of the rows and dropout.
        task: The data; default: :func:`~st_magnitude.commands.demo.docstrings.build_docstring_task`.
        say: Receives the report line by line.

    Returns:
        What ``results.json`` holds.

    Raises:
        FileExistsError: If output is not empty.
        DataError: If the environment has too few documented packages.
        RuntimeError: If the saved model does not score in a fresh process what it scored here.
    """
    began = time.perf_counter()
    output = Path(output)
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty. Choose another folder with --output, or remove it.")
    path = model or bundled_minilm()

    def stage(text: str) -> None:
        say(f"\n[{time.perf_counter() - began:4.0f} s] {text}")

    stage("Reading the docstrings of this environment (parsed, never imported)")
    task = task or build_docstring_task(seed=seed)
    for split, data in (("train", task.train), ("dev", task.dev), ("test", task.test)):
        packages = list(task.packages[split])
        listed = ", ".join(packages[:6]) + (f" and {len(packages) - 6} more" if len(packages) > 6 else "")
        say(f"  {split:5} {data}: {listed}")
    example = next(iter(task.test.queries))
    say(f"  a query:          {task.test.queries[example]}")
    say(f"  its answer:       {task.test.corpus[min(task.test.relevant_docs[example])][:90]} ...")
    if judged := task.test.negatives.get(example):
        say(f"  never an answer:  {task.test.corpus[min(judged)][:90]} ...")
    output.mkdir(parents=True, exist_ok=True)
    save_beir(task.test, output / "data", split="test")

    def fresh() -> SentenceTransformer:
        loaded = SentenceTransformer(path)
        loaded.max_seq_length = max_length
        return loaded

    stage("Encoding with the pretrained model")
    pretrained_model = fresh()
    pretrained = {"dev": encode(pretrained_model, task.dev), "test": encode(pretrained_model, task.test)}
    measured = {"pretrained": measure(pretrained["test"], COSINE, exponent=1.0)}

    for name, similarity in (("cosine", COSINE), ("qnorm", QNORM)):
        stage(f"Training with {name}: {steps} steps of {batch_size}{', bfloat16' if has_fast_bf16() else ''}")
        trained = fresh()
        train(
            trained,
            task.train,
            output / name,
            TrainConfig(
                loss=name,
                negatives=1,
                max_steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                seed=seed,
                card_sample=100,  # the demo measures all that it shows by itself
            ),
        )
        exponent = 1.0
        if similarity is QNORM:
            curve = calibrate_exponent(
                trained, task.dev.queries, task.dev.corpus, task.dev.relevant_docs, exponents=np.linspace(0, 1, 5)
            )
            exponent = float(curve.best)
            if 0 < exponent < 1:
                export(prepare(trained, Similarity(1.0, exponent)), output / "qnorm-calibrated")
        encoded = encode(trained, task.test)
        measured[name] = measure(encoded, similarity, exponent)

    stage("Results on packages that were never trained on")
    answers = pretrained["test"].answers
    say(table(measured))
    controls = run_controls(task, pretrained, measured["qnorm"].norms)
    cosine, qnorm, before = measured["cosine"], measured["qnorm"], measured["pretrained"]
    verdicts = [
        comparison("cosine - pretrained", cosine.chosen, before.chosen),
        comparison("qnorm as trained - cosine", qnorm.matched, cosine.matched),
        comparison(f"qnorm at exponent {qnorm.exponent:g} - cosine", qnorm.chosen, cosine.matched),
        comparison("half the index: qnorm - cosine", qnorm.pruned, cosine.pruned),
        comparison("pretrained + surface prior - pretrained", controls.prior, before.chosen),
        comparison(f"qnorm at exponent {qnorm.exponent:g} - pretrained + surface prior", qnorm.chosen, controls.prior),
    ]
    say("\nPaired differences over queries, 95 % bootstrap intervals:")
    say("\n".join(f"  {line}" for line in verdicts))
    say("\nControls, how much of this is the surface of the text:")
    say(f"  a classifier on length and punctuation has an AUC of {controls.auc:.3f} for 'is an answer'")
    say(f"  its logit correlates with the norm of the qnorm model at {controls.correlation_with_norm:+.2f} (Spearman)")
    say(f"  pretrained cosine + {controls.prior_weight:g} · its log-probability: nDCG@10 {controls.prior.mean():.3f}")
    plot_norms(measured, answers, output / "norms.png")

    stage("Loading the saved model in a fresh process and scoring it with mteb")
    here = float(qnorm.matched.mean())
    there = _score_elsewhere(output / "qnorm", output / "data")
    agree = abs(here - there) < 1e-3
    say(f"  nDCG@10 here {here:.4f}, mteb {there:.4f}: {'they agree' if agree else 'THEY DIFFER'}")

    results: dict[str, Any] = {
        "models": {name: _as_json(m) for name, m in measured.items()},
        "controls": _as_json(controls),
        "comparisons": verdicts,
        "mteb_ndcg_at_10": there,
        "seed": seed,
        "steps": steps,
        "packages": task.packages,
        "seconds": round(time.perf_counter() - began, 1),
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    stage("Done")
    say(f"  models     {output / 'cosine'}, {output / 'qnorm'} (SentenceTransformer loads both as they are)")
    if (output / "qnorm-calibrated").exists():
        say(f"             {output / 'qnorm-calibrated'} (exponent {qnorm.exponent:g}: st_magnitude.load)")
    say(f"  picture    {output / 'norms.png'}")
    say(f"  figures    {output / 'results.json'}")
    if not agree:
        raise RuntimeError(f"The saved model scores {there:.4f} in a fresh process and {here:.4f} here.")
    return results


def _score_elsewhere(model: Path, data: Path) -> float:
    """nDCG@10 by ``mteb.evaluate`` in a new interpreter."""
    command = [sys.executable, "-m", "st_magnitude.mteb", str(model), str(data)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr[-2000:]}")
    return float(json.loads(finished.stdout.strip().splitlines()[-1])["ndcg_at_10"])


def _as_json(record: Measurement | Controls) -> dict[str, float]:
    """Means of what is measured per query; norms are left out."""
    values = {name: value for name, value in vars(record).items() if name != "norms"}
    return {name: round(float(np.mean(value)), 4) for name, value in values.items()}
