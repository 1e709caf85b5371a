"""``st-magnitude demo``: fine-tune a retriever on the API docs of your own Python environment.

A pretrained model from PyPI is fine-tuned twice on the docstrings of the installed packages, with cosine similarity and
with QNorm, and measured before and after on packages that it was never fine-tuned on. Descriptions answer queries.
Parameter lists, references and examples never do: they are explicit negatives in training and distractors in the index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude.commands.demo.docstrings import DocstringTask, build_docstring_task
from st_magnitude.commands.demo.measure import Controls, Measurement, measure, measure_controls
from st_magnitude.commands.demo.model import bundled_minilm
from st_magnitude.commands.demo.report import comparisons, controls_report, plot_norms, table
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.calibration import calibrate_exponent
from st_magnitude.finetune.run import train
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.similarity import COSINE, QNORM, Similarity
from st_magnitude.surgery.export import export
from st_magnitude.surgery.normalize import prepare

__all__ = ["run"]

Say = Callable[[str], None]


class _Clock:
    """Announces the stages of the demo, each with the time so far and an estimate of the time left.

    The expected seconds are those of two cores without bfloat16. After the first stage they are scaled by the pace of
    the stages before, so that the estimate follows the machine.
    """

    def __init__(self, say: Say, training: float) -> None:
        self.say, self.began = say, time.perf_counter()
        self.expected = {
            "read": 30.0,
            "pretrained": 20.0,
            "cosine": 20.0 + 50.0 * training,
            "qnorm": 25.0 + 50.0 * training,
            "results": 5.0,
            "mteb": 30.0,
        }

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def stage(self, name: str, text: str) -> None:
        names = list(self.expected)
        expected = list(self.expected.values())
        done, left = sum(expected[: names.index(name)]), sum(expected[names.index(name) :])
        minutes = left * (self.seconds / done if done else 1.0) / 60
        remaining = f"about {minutes:.0f} min left" if minutes >= 1.5 else "about a minute left"
        self.say(f"\n[{self.seconds:4.0f} s, {remaining}] {text}")


def run(
    output: str | Path,
    model: str | None = None,
    steps: int = 20,
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    max_length: int = 32,
    seed: int = 0,
    task: DocstringTask | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Builds the data, trains twice, measures, saves, and has mteb score the saved model in a fresh process.

    Args:
        output: New or empty folder for models, data, ``norms.png`` and ``results.json``, whose content is returned.
        model: SentenceTransformer folder or hub id; default: all-MiniLM-L6-v2 from PyPI.
        steps: Number of training steps of each of the two models.
        batch_size: Number of queries in a step, each with its answer and one explicit negative.
        learning_rate: Peak learning rate.
        max_length: Number of tokens of a text that the model reads.
        seed: Seed for the data, the order of the rows and dropout.
        task: Data to use instead of `build_docstring_task`.
        say: Function that receives the report line by line.
    """
    output = Path(output)
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty. Choose another folder with --output, or remove it.")
    path = model or bundled_minilm()
    clock = _Clock(say, training=steps * batch_size / 640)

    clock.stage("read", "Reading the docstrings of this environment (parsed, never imported)")
    task = task or build_docstring_task(train_queries=1000, test_queries=300, max_train_files=40, seed=seed)
    _describe(task, say)
    output.mkdir(parents=True, exist_ok=True)
    task.test.save(output / "data", split="test")

    def fresh() -> SentenceTransformer:
        loaded = SentenceTransformer(path)
        loaded.max_seq_length = max_length
        return loaded

    clock.stage("pretrained", "Encoding with the pretrained model")
    untrained = fresh()
    pretrained = {split: _encode(untrained, data) for split, data in (("dev", task.dev), ("test", task.test))}
    measured = {"pretrained": measure(pretrained["test"], task.test.corpus, COSINE, exponent=1.0)}
    say(f"  nDCG@10 {measured['pretrained'].matched.mean():.3f}")

    config = TrainConfig(negatives=1, max_steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed)
    for name, similarity in (("cosine", COSINE), ("qnorm", QNORM)):
        clock.stage(name, f"Training with {name}: {steps} steps of {batch_size} queries")
        # a small sample for the model card: the demo measures everything that it shows itself
        measured[name] = _train(fresh(), task, similarity, output / name, replace(config, loss=name, card_sample=100))
        _summarise(name, measured, say)

    clock.stage("results", "Results on packages that were never trained on")
    controls = measure_controls(task, pretrained, measured["qnorm"].norms)
    compared = comparisons(measured, controls)
    say(f"{table(measured)}\n\nPaired differences over queries, with 95 % bootstrap intervals:")
    say("\n".join(f"  {line}" for line in compared))
    say(f"\nControls: how much of this is the surface of the text?\n{controls_report(controls)}")
    plot_norms(measured, pretrained["test"].degrees > 0, output / "norms.png")

    clock.stage("mteb", "Loading the saved model in a fresh process and scoring it with mteb")
    there = _score_elsewhere(output / "qnorm", output / "data", say, expected=float(measured["qnorm"].matched.mean()))
    results: dict[str, Any] = {
        "models": {name: _as_json(measurement) for name, measurement in measured.items()},
        "controls": _as_json(controls),
        "comparisons": compared,
        "mteb_ndcg_at_10": there,
        "seed": seed,
        "steps": steps,
        "packages": task.packages,
        "seconds": round(clock.seconds, 1),
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _name_files(output, measured["qnorm"].exponent, clock.seconds, say)
    return results


def _describe(task: DocstringTask, say: Say) -> None:
    """Sizes of the splits, and an example of a query with its answer and its boilerplate."""
    for split, data in (("train", task.train), ("dev", task.dev), ("test", task.test)):
        packages = list(task.packages[split])
        listed = ", ".join(packages[:6]) + (f" and {len(packages) - 6} more" if len(packages) > 6 else "")
        say(f"  {split:5} {data}: {listed}")
    example = next(iter(task.test.queries))
    say(f"  a query:          {task.test.queries[example]}")
    say(f"  its answer:       {task.test.corpus[min(task.test.relevant[example])][:90]} ...")
    if judged := task.test.negatives.get(example):
        say(f"  never an answer:  {task.test.corpus[min(judged)][:90]} ...")


def _encode(model: SentenceTransformer, data: RetrievalData) -> EncodedTask:
    """Raw embeddings; the model is the same afterwards."""
    task = data
    return task.encode(model, batch_size=64, show_progress_bar=True, before_normalize=True)


def _train(
    model: SentenceTransformer, task: DocstringTask, similarity: Similarity, folder: Path, config: TrainConfig
) -> Measurement:
    """Trains, saves and measures. With QNorm, dev chooses the document exponent, and that model is saved as well."""
    train(model, task.train, folder, config)
    exponent, dev = 1.0, task.dev
    if similarity is QNORM:
        curve = calibrate_exponent(model, dev, exponents=np.linspace(0, 1, 5))
        exponent = float(curve.highest)
        if 0 < exponent < 1:
            export(prepare(model, Similarity(1.0, exponent)), folder.with_name("qnorm-calibrated"), overwrite=True)
    return measure(_encode(model, task.test), task.test.corpus, similarity, exponent)


def _summarise(name: str, measured: Mapping[str, Measurement], say: Say) -> None:
    """What a training stage has shown, in two lines at most."""
    before, after = measured["pretrained"], measured[name]
    say(f"  nDCG@10, scored as trained: {before.matched.mean():.3f} -> {after.matched.mean():.3f}")
    if name == "qnorm":
        say(f"  AUC of the norm for 'answers a query': {before.auc:.3f} -> {after.auc:.3f}")
        kept, cosine = after.relevant_kept, measured["cosine"].relevant_kept
        say(f"  Half of the index, chosen by norm, keeps {kept:.0%} of the answers (cosine {cosine:.0%}).")


def _score_elsewhere(model: Path, data: Path, say: Say, expected: float) -> float:
    """nDCG@10 by ``mteb.evaluate`` in a new interpreter, which has to agree with the figure that was measured here."""
    command = [sys.executable, "-m", "st_magnitude.mteb", str(model), str(data)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr[-2000:]}")
    found = float(json.loads(finished.stdout.strip().splitlines()[-1])["ndcg_at_10"])
    if abs(found - expected) >= 1e-3:
        raise RuntimeError(f"The saved model scores {found:.4f} in a fresh process, but {expected:.4f} here.")
    say(f"  nDCG@10 here {expected:.4f}, mteb {found:.4f}: they agree")
    return found


def _name_files(output: Path, exponent: float, seconds: float, say: Say) -> None:
    say(f"\n[{seconds:4.0f} s] Done")
    say(f"  models     {output / 'cosine'}, {output / 'qnorm'} (SentenceTransformer loads both as they are)")
    if (output / "qnorm-calibrated").exists():
        say(f"             {output / 'qnorm-calibrated'} (exponent {exponent:g}: st_magnitude.load)")
    say(f"  picture    {output / 'norms.png'}")
    say(f"  figures    {output / 'results.json'}")


def _as_json(record: Measurement | Controls) -> dict[str, float]:
    """Figures as numbers: means of what is measured per query, without the norms."""
    values = {name: value for name, value in vars(record).items() if name != "norms"}
    return {name: round(float(np.mean(value)), 4) for name, value in values.items()}
