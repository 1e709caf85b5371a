"""Train a small CLIP whose text features have a norm that carries information, on emoji and their
names.

    pip install ".[clip]" resvg-py        (and npm, for the pictures)
    python examples/clip_emoji.py --steps 100

An open_clip model, trained from scratch, learns to find the name of a picture. Its image features
are normalised, and its text features are not. The script saves a plain open_clip checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import open_clip
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

from st_magnitude.clip import AsymmetricClipLoss, evaluate_retrieval, rescale_output, unnormalize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.data import emoji  # downloads and draws the pictures


def pixels(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1  # (n, 3, S, S)


@torch.no_grad()
def encode(model: CLIP, images: np.ndarray, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw features: normalize=False is the default of open_clip's encoders."""
    tokens = open_clip.tokenize(texts, context_length=model.context_length)
    return model.encode_image(pixels(images)), model.encode_text(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", default="runs/clip_emoji.pt")
    arguments = parser.parse_args()

    data = emoji.build()  # two styles with permissive licences
    splits = data.split(0)

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=(1, 1, 1, 1), width=16, image_size=48)
    text = CLIPTextCfg(context_length=20, vocab_size=49408, width=64, heads=4, layers=2)
    model = unnormalize(CLIP(128, vision, text, output_dict=True))
    loss = AsymmetricClipLoss.from_preset("imgnorm-i2t")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rng = np.random.default_rng(0)
    for step in range(arguments.steps):
        rows = rng.choice(len(splits.images), arguments.batch_size, replace=False)
        names = [data.emoji[i].text for i in splits.owners[rows]]
        batch = pixels(splits.images[rows]), open_clip.tokenize(names, context_length=20)
        if step == 0:
            rescale_output(model, *batch)
        value = loss(**model(*batch))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, np.log(100))
        if step % 10 == 0:
            print(f"step {step}: loss {value.item():.3f}", flush=True)

    model.eval()
    test = splits.unseen_style
    images, texts = encode(model, test.images, test.texts)
    for name, value in evaluate_retrieval(images, texts, test.relevance).items():
        print(f"{name:24} {value:.3f}")
    groups = sorted({e.group for e in data.emoji})
    _, classes = encode(model, test.images[:1], groups)
    right = np.array(test.groups)[:, None] == np.array(groups)  # (n, 9)
    print(
        "zero-shot, nine groups:",
        evaluate_retrieval(images, classes, right, ks=(1,))["cosine_i2t_recall@1"],
    )

    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), arguments.output)
    plain = CLIP(128, vision, text)  # open_clip's own class, without st_magnitude
    plain.load_state_dict(torch.load(arguments.output, weights_only=True))
    again, _ = encode(plain.eval(), test.images[:4], test.texts[:4])
    print(
        "open_clip loads the checkpoint with the same features:",
        torch.allclose(again, images[:4], atol=1e-5),
    )


if __name__ == "__main__":
    main()
