"""open_clip's training program with our loss."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _open_clip_tiny import VISION, batch, clip, open_clip
from PIL import Image

import st_magnitude as stm
from st_magnitude.clip import AsymmetricClipLoss
from st_magnitude.clip.model import CLIP, UnnormalizedCLIP

open_clip_main = pytest.importorskip("open_clip_train.main", exc_type=(ImportError, RuntimeError))
from open_clip_train.train import train_one_epoch  # noqa: E402

from st_magnitude.clip.__main__ import main, training_program  # noqa: E402


class Loader(list):
    """Batches, with what open_clip asks of a loader."""

    def __init__(self, images, texts, size):
        super().__init__(zip(images.split(size), texts.split(size), strict=True))
        self.num_samples, self.num_batches = len(images), len(self)


def loop_arguments(**options):
    """The arguments that train_one_epoch, evaluate and create_loss read."""
    off = "distill horovod wandb distributed local_loss gather_with_grad siglip save_logs"
    ones = "accum_freq world_size log_every_n_steps val_frequency epochs"
    given = dict.fromkeys(off.split(), False) | dict.fromkeys(ones.split(), 1)
    given |= {"rank": 0, "local_rank": 0, "skip_scheduler": True, "grad_clip_norm": None}
    given |= {"device": "cpu", "precision": "fp32", "batch_size": 8, "model": "tiny"}
    return SimpleNamespace(**given | {"loss_dist_impl": None} | options)


def train(model, loss, data, optimizer=torch.optim.SGD, **options):
    """A few steps of train_one_epoch; returns the parameters."""
    args = loop_arguments(**options)
    optimizer = optimizer(model.parameters(), lr=0.01)
    info = SimpleNamespace(dataloader=Loader(*data, 8), set_epoch=lambda epoch: None)
    train_one_epoch(model, {"train": info}, loss, 0, optimizer, None, None, None, args)
    return parameters(model)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture
def models():
    """Two equal models, and data for them."""
    model = clip()
    return model, copy.deepcopy(model), batch(model, 24)


def test_norm_sym_trains_as_open_clip_does(models):
    ours, stock, data = models
    start = parameters(ours)
    loss = training_program("norm-sym").create_loss(loop_arguments())
    assert type(loss) is AsymmetricClipLoss
    expected = train(stock, open_clip_main.create_loss(loop_arguments()), data)
    for name, value in train(ours, loss, data).items():
        assert (value - start[name]).abs().max() > 0
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_training_in_bfloat16_lowers_the_loss(models, caplog):
    model, _, data = models
    stm.clip.rescale_output(stm.clip.unnormalize(model))
    regularizers = [(stm.SIGReg(num_directions=8), 0.01)]
    loss = AsymmetricClipLoss.from_preset("imgnorm-i2t", regularizers=regularizers)
    data = tuple(x[:8].repeat(12, *[1] * (x.ndim - 1)) for x in data)
    with caplog.at_level("INFO"):
        train(model, loss, data, optimizer=torch.optim.Adam, precision="amp_bf16")
    seen = [float(x) for x in re.findall(r"Contrastive_loss: ([\d.]+)", caplog.text)]
    assert len(seen) == 12
    assert seen[-1] < 0.7 * seen[0]
    assert "Sigreg_loss" in caplog.text


@pytest.mark.parametrize("preset", ["norm-sym", "imgnorm-i2t", "txtnorm-t2i"])
def test_validation_has_the_trained_loss_and_similarity(models, preset):
    model, _, (images, texts) = models
    if preset != "norm-sym":
        stm.clip.unnormalize(model)
    data = {"val": SimpleNamespace(dataloader=Loader(images, texts, 8))}
    found = training_program(preset).evaluate(model, data, 1, loop_arguments())
    loss = AsymmetricClipLoss.from_preset(preset)
    with torch.no_grad():
        raw = model.encode_image(images), model.encode_text(texts)
        expected = loss(*raw, model.logit_scale.exp()).item()
    assert found[f"{preset}_val_loss"] == pytest.approx(expected)
    scores = loss.similarity(*raw)
    for name, matrix in (("image_to_text", scores), ("text_to_image", scores.T)):
        ranks = (matrix > matrix.diagonal()[:, None]).sum(1)
        assert found[f"{name}_R@5"] == pytest.approx((ranks < 5).float().mean().item())


# ------------------------------------------------------------------------------------ the entry


@pytest.fixture
def local_dir(tmp_path):
    """A tiny model as open_clip's ``local-dir:``; its own tokenizer needs the whole vocabulary."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    text = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": text}
    content = {"model_cfg": config, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    return folder


def test_the_program_is_a_copy(local_dir):
    before = dict(vars(open_clip_main))
    program = training_program("imgnorm-i2t")
    loss = program.create_loss(loop_arguments(distributed=True))
    assert (loss.similarity, loss.direction, loss.gather_across_devices) == (stm.QNORM, "i2t", True)
    images, texts = torch.randn(16, 3, 16, 16), torch.randint(1, 49407, (16, 8))
    name = f"local-dir:{local_dir}"
    rescaled, *_ = program.create_model_and_transforms(name, output_dict=True)
    stock, *_ = training_program("norm-sym").create_model_and_transforms(name)
    assert type(rescaled) is UnnormalizedCLIP
    assert type(stock) is CLIP
    for embeddings in (rescaled.encode_image(images), rescaled.encode_text(texts)):
        assert embeddings.norm(dim=1).mean().item() == pytest.approx(1, abs=0.2)
    assert (stock.encode_image(images).norm(dim=1).mean() - 1).abs() > 0.5
    assert vars(open_clip_main) == before
    assert sys.modules["open_clip_train.main"] is open_clip_main


@pytest.mark.parametrize(
    "options", [{"siglip": True}, {"distill": True}, {"model": "coca_ViT-B-32"}]
)
def test_other_losses_are_not_replaced_in_silence(options):
    with pytest.raises(ValueError, match="losses of their own"):
        training_program("norm-sym").create_loss(loop_arguments(**options))


def test_the_command_line(monkeypatch, capsys):
    seen = []

    def record(preset):
        return SimpleNamespace(main=lambda arguments: seen.append((preset, *arguments)))

    monkeypatch.setattr("st_magnitude.clip.__main__.training_program", record)
    main(["imgnorm-i2t", "--", "--model", "ViT-B-32", "--", "x"])
    assert seen == [("imgnorm-i2t", "--model", "ViT-B-32", "--", "x")]
    for wrong, message in (("imgnorm-i2t", "follow after"), ("cos", "cos")):
        with pytest.raises(SystemExit):
            main([wrong])
        assert message in capsys.readouterr().err


def test_a_program_without_what_we_replace(monkeypatch):
    """As without webdataset, or in open_clip 4, whose program has no create_loss."""
    monkeypatch.setitem(sys.modules, "open_clip_train.params", None)
    with pytest.raises(ImportError, match=r'cannot be used.*pip install "\.\[clip\]"'):
        main(["norm-sym", "--", "--model", "ViT-B-32"])


@pytest.mark.slow
def test_the_whole_training_program(local_dir, tmp_path):
    """From CSV and PNG files, accumulating gradients, to a checkpoint of open_clip's CLIP."""
    lines, data = ["filepath\ttitle"], str(tmp_path / "data.csv")
    for i in range(24):
        Image.new("RGB", (20, 20), (10 * i, 255 - 10 * i, 100)).save(tmp_path / f"{i}.png")
        lines.append(f"{tmp_path / f'{i}.png'}\ta square of {10 * i}")
    Path(data).write_text("\n".join(lines))
    options = (
        f"--model local-dir:{local_dir} --train-data {data} --val-data {data} --dataset-type csv "
        "--batch-size 4 --accum-freq 2 --epochs 1 --workers 0 --warmup 1 --precision fp32 "
        f"--device cpu --logs {tmp_path / 'logs'} --name run"
    )
    command = [sys.executable, "-m", "st_magnitude.clip", "imgnorm-i2t", "--", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    log = (tmp_path / "logs" / "run" / "out.log").read_text()
    assert "UnnormalizedCLIP(" in log
    assert log.count("Contrastive_loss") >= 2
    assert "image_to_text_R@1" in log

    checkpoint = torch.load(tmp_path / "logs" / "run" / "checkpoints" / "epoch_1.pt")
    stock = open_clip.create_model(f"local-dir:{local_dir}").eval()
    stock.load_state_dict(checkpoint["state_dict"])
    norms = stock.encode_image(torch.randn(5, 3, 16, 16)).norm(dim=1)
    assert 0.5 < norms.mean() < 2  # rescaled, then trained
