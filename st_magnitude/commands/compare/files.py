"""The files of a finished comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from st_magnitude._files import whole_file
from st_magnitude.commands.compare.bench import Bench
from st_magnitude.commands.compare.result import CompareResult
from st_magnitude.diagnosis.report import write_page

__all__ = ["write_files"]


def write_files(result: CompareResult, bench: Bench, model: str | None, data: Any) -> None:
    """Writes everything into the output folder; compare.json, which marks the comparison as finished, comes last."""
    output = bench.output
    shutil.copytree(bench.folder(result.winner.candidate), output / "model", dirs_exist_ok=True)
    (output / "train_winner.py").write_text(_script(result, bench, model, data), encoding="utf-8")
    (output / "compare.md").write_text(result.markdown() + "\n", encoding="utf-8")
    facts = f"{result.model}: {len(result.candidates)} candidates, {result.dev_queries:,} dev queries"
    write_page(output, "Comparison of losses", f"{facts}, {result.test.queries:,} test queries.", [result.section()])
    with whole_file(output / "compare.json") as file:
        file.write((json.dumps(result.to_dict(), indent=2) + "\n").encode())
    for folder in ("models", "checkpoints"):
        shutil.rmtree(output / folder, ignore_errors=True)


def _script(result: CompareResult, bench: Bench, model: str | None, data: Any) -> str:
    """Python that trains the winner again. Data and a model in memory are saved beside it."""
    output, config, entry = bench.output, bench.config, result.winner
    if model is None:
        bench.base.save_pretrained(str(output / "base"))
    if isinstance(data, str | Path):
        splits = ", ".join(f"{name}={getattr(config, name)!r}" for name in ("split", "dev_split", "test_split"))
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in ("dev_queries", "documents", "seed"))
        imports = "from st_magnitude.commands.compare.data import read_splits"
        lines = [
            f"splits = read_splits({str(data)!r}, {splits}, {sizes})",
            "train_data, dev = splits.train, splits.dev",
        ]
    else:
        for name, part in (("train", bench.splits.train), ("dev", bench.splits.dev)):
            part.save(output / "data" / name, name)
        imports = "from st_magnitude.data.retrieval import RetrievalData"
        folder = str(output / "data")
        lines = ["read = RetrievalData.from_beir"]
        lines += [f"train_data, dev = (read({folder!r} + f'/{{name}}', name) for name in ('train', 'dev'))"]
    candidate = entry.candidate
    defaults = vars(type(bench.settings(candidate, 1))())
    changed = {k: v for k, v in vars(bench.settings(candidate, entry.last.steps)).items() if v != defaults[k]}
    arguments = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    options = f', loss_options={{"regularizers": [(SIGReg(), {candidate.sigreg})]}}' if candidate.sigreg else ""
    start = repr(model or str(output / "base"))
    start = start if config.dim is None else f"load({start}, truncate_dim={config.dim})"
    names = [name for name, is_used in (("SIGReg", candidate.sigreg), ("load", config.dim)) if is_used]
    return "\n".join(
        [
            f'"""Trains {candidate.name} again, the winner of st-magnitude compare."""',
            "",
            *([f"from st_magnitude import {', '.join(names)}"] if names else []),
            imports,
            "from st_magnitude.finetune.run import TrainConfig, train",
            "",
            *lines,
            f"config = TrainConfig({arguments})",
            f"model, output = {start}, {str(output / 'again')!r}",
            f"trained = train(model, train_data, output, config, dev=dev{options})",
            "print(trained.comparison)",
            "",
        ]
    )
