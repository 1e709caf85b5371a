"""open_clip's training loop and program with our loss."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _open_clip_tiny import VISION, batch, clip, open_clip
from _processes import python
from PIL import Image

import st_magnitude as stm
from st_magnitude.clip import PRESETS, AsymmetricClipLoss
from st_magnitude.clip.__main__ import main

program = pytest.importorskip("open_clip_train.main", exc_type=(ImportError, RuntimeError))


class Loader(list):
    """Batches, with what open_clip asks of a loader."""

    num_batches, num_samples = 12, 96


def loop_arguments():
    """The arguments that train_one_epoch reads."""
    off = "distill wandb distributed save_logs"
    ones = "accum_freq world_size log_every_n_steps val_frequency epochs"
    given = dict.fromkeys(off.split(), False) | dict.fromkeys(ones.split(), 1)
    given |= {"rank": 0, "local_rank": 0, "skip_scheduler": True, "grad_clip_norm": None}
    given |= {"device": "cpu", "precision": "amp_bf16", "batch_size": 8, "horovod": False}
    return SimpleNamespace(**given)


def test_training_in_bfloat16_lowers_the_loss(caplog):
    model = clip()
    stm.clip.rescale_output(stm.clip.unnormalize(model))
    regularizers = [(stm.SIGReg(num_directions=8), 0.01)]
    loss = AsymmetricClipLoss.from_preset("imgnorm-i2t", regularizers=regularizers)
    loader = Loader([batch(model, 8)] * 12)
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with caplog.at_level("INFO"):
        program.train_one_epoch(model, data, loss, 0, optimizer, None, None, None, loop_arguments())
    seen = [float(x) for x in re.findall(r"Contrastive_loss: ([\d.]+)", caplog.text)]
    assert len(seen) == 12
    assert seen[-1] < 0.7 * seen[0]
    assert "Sigreg_loss" in caplog.text


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_the_entry_point_gives_open_clip_a_loss(preset, monkeypatch):
    """--precision stays open_clip's, though it begins as --preset does."""
    seen = []

    def run(arguments):
        args = program.parse_args(arguments)
        args.distributed = args.distill = False
        seen.append((args.precision, program.create_loss(args)))

    monkeypatch.setattr(program, "main", run)
    given = program.create_loss, program.create_model_and_transforms
    main(["--model", "ViT-B-32", "--prec", "fp32", *(["--preset", preset] if preset else [])])
    [(precision, loss)] = seen
    image, text, direction = PRESETS[preset or "imgnorm-i2t"]
    assert precision == "fp32"
    assert (loss.similarity.exponents, loss.direction) == ((image, text), direction)
    assert (program.create_loss, program.create_model_and_transforms) == given
    with pytest.raises(SystemExit, match="2"):
        main(["--siglip"])
    with pytest.raises(SystemExit, match="2"):
        main(["--preset", "imgnorm"])


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
