"""Train sentence-transformers' own CLIP on images and captions, with the losses for text.

    python examples/clip_sentence_transformers.py --steps 150

A tiny CLIP with random weights learns to name coloured shapes, offline and in less than a minute.
For a real model, replace `tiny_clip(...)` by
`SentenceTransformer("sentence-transformers/clip-ViT-B-32")`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
)

import st_magnitude as stm

COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
SHAPES = ("circle", "square", "bar", "cross")
CAPTIONS = [f"a {colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES)]


def draw(caption: str, rng: random.Random, size: int = 32) -> Image.Image:
    """Draws the shape of a caption at a random place on a light background."""
    _, colour, shape = caption.split()
    image = Image.new("RGB", (size, size), (rng.randint(200, 255),) * 3)
    canvas = ImageDraw.Draw(image)
    x, y, r = rng.randint(10, size - 10), rng.randint(10, size - 10), rng.randint(6, 9)
    if shape == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        canvas.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    if shape in ("bar", "cross"):
        canvas.rectangle((x - r, y - 2, x + r, y + 2), fill=colour)
    if shape == "cross":
        canvas.rectangle((x - 2, y - r, x + 2, y + r), fill=colour)
    return image


def pictures(copies: int, seed: int) -> dict[str, list]:
    """{"anchor": captions, "positive": images}, in groups that contain every caption once."""
    rng = random.Random(seed)
    captions = [caption for _ in range(copies) for caption in rng.sample(CAPTIONS, len(CAPTIONS))]
    return {"anchor": captions, "positive": [draw(caption, rng) for caption in captions]}


def tiny_clip(folder: str | Path, module: type[Transformer] = Transformer) -> SentenceTransformer:
    """A CLIP of transformers with random weights and the words of the captions, as a
    SentenceTransformer."""
    words = ["<s>", "</s>", "<unk>", *dict.fromkeys(" ".join(CAPTIONS).split())]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=8,
    )
    size = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    text = size | {
        "vocab_size": len(words),
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    vision = size | {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(text_config=text | {"pad_token_id": 1}, vision_config=vision, projection_dim=32)
    )
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return SentenceTransformer(modules=[module(str(folder))], device="cpu")


def accuracy(model: SentenceTransformer, test: dict[str, list]) -> float:
    """Share of the images for which their own caption has the highest score."""
    scores = model.similarity(model.encode(test["positive"]), model.encode(CAPTIONS)).numpy()
    return float(
        np.mean(
            [
                CAPTIONS[i] == caption
                for i, caption in zip(scores.argmax(axis=1), test["anchor"], strict=True)
            ]
        )
    )


def train(model: SentenceTransformer, steps: int, output: str | Path) -> SentenceTransformer:
    """Trains with s(caption, image) = |image| cos. Images are searched for, so they keep their
    norm."""
    stm.prepare(model, "qnorm")
    args = SentenceTransformerTrainingArguments(
        str(output),
        max_steps=steps,
        per_device_train_batch_size=len(CAPTIONS),
        learning_rate=1e-3,
        batch_sampler="no_duplicates",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Dataset.from_dict(pictures(copies=20, seed=0))
    SentenceTransformerTrainer(model, args, data, loss=stm.QNormRankingLoss(model)).train()
    return model


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, help="folder to save the trained model in")
    options = parser.parse_args(arguments)
    test = pictures(copies=5, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_clip(Path(folder) / "clip")
        print(f"accuracy on new images, untrained: {accuracy(model, test):.2f}")
        train(model, options.steps, Path(folder) / "trainer")
        found = accuracy(model, test)
        print(
            f"trained with QNormRankingLoss for {options.steps} steps: {found:.2f} (chance"
            f" {1 / len(CAPTIONS):.2f})"
        )
        if options.output:
            model.save_pretrained(str(options.output))
    return found


if __name__ == "__main__":
    main()
