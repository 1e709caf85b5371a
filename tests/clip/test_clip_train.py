"""open_clip's training program with our loss."""

import json
from pathlib import Path

import pytest
import torch
from _open_clip_tiny import VISION, open_clip
from _processes import python
from PIL import Image

from st_magnitude.clip import PRESETS
from st_magnitude.clip.__main__ import main

program = pytest.importorskip("open_clip_train.main", exc_type=(ImportError, RuntimeError))


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_the_entry_point_gives_open_clip_a_loss(preset, monkeypatch):
    """--precision stays open_clip's, though it begins as --preset does."""
    seen = []

    def run(arguments):
        args = program.parse_args(arguments)
        args.distributed = False
        seen.append((args.precision, program.create_loss(args)))

    monkeypatch.setattr(program, "main", run)
    given = program.create_loss, program.create_model_and_transforms
    arguments = ["--train-data", "data.csv", "--prec", "fp32"]
    main(arguments + (["--preset", preset] if preset else []))
    [(precision, loss)] = seen
    image, text, direction = PRESETS[preset or "imgnorm-i2t"]
    assert precision == "fp32"
    assert (loss.similarity.exponents, loss.direction) == ((image, text), direction)
    assert (program.create_loss, program.create_model_and_transforms) == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train-data", "data.csv", "--siglip"], "--siglip and --distill-model have losses"),
        (["--train-data", "data.csv", "--preset", "imgnorm"], "invalid choice: 'imgnorm'"),
    ],
)
def test_what_the_program_would_stumble_over(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_training_program(tmp_path):
    """From CSV and PNG files to a checkpoint of open_clip's CLIP, with its whole vocabulary."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    text = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": text}
    content = {"model_cfg": config, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    lines, data = ["filepath\ttitle"], str(tmp_path / "data.csv")
    for i in range(24):
        Image.new("RGB", (20, 20), (10 * i, 255 - 10 * i, 100)).save(tmp_path / f"{i}.png")
        lines.append(f"{tmp_path / f'{i}.png'}\ta square of {10 * i}")
    Path(data).write_text("\n".join(lines))
    options = (
        f"--model local-dir:{folder} --train-data {data} --val-data {data} --dataset-type csv "
        "--batch-size 4 --accum-freq 2 --epochs 1 --workers 0 --warmup 1 --precision fp32 "
        f"--device cpu --logs {tmp_path / 'logs'} --name run"
    )
    python("-m", "st_magnitude.clip", "--preset", "txtnorm-t2i", *options.split())
    log = (tmp_path / "logs" / "run" / "out.log").read_text()
    assert "UnnormalizedCLIP(" in log
    assert log.count("Contrastive_loss") >= 2
    assert "image_to_text_R@1" in log

    checkpoint = torch.load(tmp_path / "logs" / "run" / "checkpoints" / "epoch_1.pt")
    stock = open_clip.create_model(f"local-dir:{folder}").eval()
    stock.load_state_dict(checkpoint["state_dict"])
    norms = stock.encode_image(torch.randn(5, 3, 16, 16)).norm(dim=1)
    assert 0.5 < norms.mean() < 2  # rescaled, then trained
