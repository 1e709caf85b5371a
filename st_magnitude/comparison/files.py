"""The files of a finished comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from st_magnitude._files import whole_file
from st_magnitude._plot import draw
from st_magnitude.comparison.result import CompareResult
from st_magnitude.comparison.trial import Setup

__all__ = ["write_files"]


def write_files(result: CompareResult, setup: Setup, output: Path, trained: Path, model: Any, data: Any) -> None:
    """Writes everything into the output folder; compare.json, which marks the comparison as finished, comes last."""
    shutil.copytree(trained, output / "model", dirs_exist_ok=True)
    (output / "train_winner.py").write_text(_script(result, setup, output, model, data), encoding="utf-8")
    (output / "compare-curves.png").write_bytes(draw(result.paint, (6.0, 4.0)).png)
    lines = [result.to_markdown(), *result.notes, "![nDCG@10 on dev by steps](compare-curves.png)"]
    (output / "compare.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    with whole_file(output / "compare.json") as file:
        file.write((json.dumps(result.to_dict(), indent=2) + "\n").encode())
    shutil.rmtree(output / "models")


def _script(result: CompareResult, setup: Setup, output: Path, model: Any, data: Any) -> str:
    """Python that trains the winner again. A model or data that were in memory are to be filled in."""
    config, entry = setup.config, result.winner
    settings = entry.candidate.settings(config, setup.base, entry.steps)

    def call(of: Any) -> str:
        defaults = vars(type(of)())
        changed = {name: value for name, value in vars(of).items() if value != defaults[name]}
        return f"{type(of).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    start = repr(model) if isinstance(model, str) else "..."
    if config.dim is not None:
        start = f"stm.load({start}, truncate_dim={config.dim})"
    read = f"read_splits({str(data)!r}" if isinstance(data, str | Path) else "make_splits(..."
    sigreg = entry.candidate.sigreg
    options = f', loss_options={{"regularizers": [(stm.SIGReg(), {sigreg})]}}' if sigreg else ""
    return "\n".join(
        [
            f'"""Trains {entry.name} again, the winner of st-magnitude compare. Replace ... by your model and data."""',
            "",
            "import st_magnitude as stm",
            "from st_magnitude import CompareConfig",
            f"from st_magnitude.comparison.data import {read.partition('(')[0]}",
            "from st_magnitude.finetune.run import TrainConfig, train",
            "",
            f"splits = {read}, {call(config)})",
            f"config = {call(settings)}",
            f"trained = train({start}, splits.train, {str(output / 'again')!r}, config, dev=splits.dev{options})",
            "print(trained.comparison)",
            "",
        ]
    )
