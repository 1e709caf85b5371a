"""What it costs to leave false negatives out of a batch, beside sentence-transformers' GIST losses.

    python benchmarks/speed/false_negatives.py

Forward and backward on embeddings (cosine, float32, D = 384 for the model and for the guide, whose
encoding is not counted), as ratios to CosineRankingLoss(same_text="keep") within one run. Times are
minima of interleaved rounds, in CPU time, which other jobs on the machine change little; memory is
what a step allocates at its peak.

- "no equal texts", "equal texts": same_text="exclude" with the hashes of 64 tokens a text; one
  document in ten occurs twice, or none does.
- "own margin": margin=-0.1. "guide": margin=0.05 with a guide.
- GISTEmbedLoss and CachedGISTEmbedLoss (32 rows at a time) with contrast_anchors=False and
  contrast_positives=False, which have the value of "guide". Their nn.CosineSimilarity holds B x B x
  D numbers, or 32 x B x D: GISTEmbedLoss runs up to B = 512 only, and the cached one up to B =
  2,048, on 64 of the rows, whose time is multiplied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.speed.kernel import Embedded, seconds
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.studies.estimates import markdown
from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss, GISTEmbedLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from st_magnitude import COSINE, CosineRankingLoss
from st_magnitude.losses.keys import Texts, text_keys

DIM, CACHED_ROWS = 384, 64
REPEATS = {512: 40, 2048: 10, 8192: 2}


class Stub(Embedded):
    """A model, or a guide, whose embeddings are in the features under its name."""

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    )
    max_seq_length = 64

    def __init__(self, name: str) -> None:
        super().__init__(DIM)
        self.name = name

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.name]}


def pairs(size: int) -> tuple[Tensor, Tensor]:
    """Queries and positives with a cosine of about .7; the positives of the second half repeat
    every tenth time."""
    queries = torch.randn(size, DIM)
    documents = queries + torch.randn_like(queries)
    documents[size // 2 :: 10] = documents[: size - size // 2 : 10]
    return queries, documents


def steps(size: int) -> dict[str, tuple[Callable[[], Tensor], float]]:
    """For every name a step, which returns the loss, and the number of times that the batch takes
    it."""
    torch.manual_seed(0)
    queries, documents = (x.requires_grad_() for x in pairs(size))
    guided = pairs(size)
    guide = Texts(guide=[COSINE.document(x) for x in guided])
    tokens = [torch.randint(30_000, (size, 64)) for _ in range(3)]
    tokens[2][size // 2 :: 10] = tokens[2][: size - size // 2 : 10]
    columns = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]

    def step(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            value = loss()
            if value.requires_grad:  # the cached loss has taken its gradients
                value.backward()
            # here, so that the peak of the next step does not depend on it
            queries.grad = documents.grad = None
            return value.detach()

        return run

    def ours(texts: Callable[[], Texts], **options: Any) -> tuple[Callable[[], Tensor], float]:
        loss = CosineRankingLoss(Stub("model"), **options)
        return step(lambda: loss.compute_loss_from_embeddings([queries, documents], texts())), 1.0

    def keys(*numbers: int) -> Callable[[], Texts]:
        return lambda: Texts(keys=[text_keys(columns[i], i) for i in numbers])

    found = {
        "no mask": ours(Texts, same_text="keep"),
        "no equal texts": ours(keys(0, 1)),
        "equal texts": ours(keys(0, 2)),
        "own margin": ours(Texts, same_text="keep", margin=-0.1),
        "guide": ours(lambda: guide, same_text="keep", margin=0.05),
    }
    gist: dict[str, Any] = {"model": Stub("model"), "guide": Stub("guide")}
    gist |= {"temperature": 0.05, "margin": 0.05}
    gist |= {"contrast_anchors": False, "contrast_positives": False}
    if size <= 512:
        both = zip((queries, documents), guided, strict=True)
        features = [{"model": a, "guide": b} for a, b in both]
        plain = GISTEmbedLoss(**gist)
        expected = plain(features, None).detach()
        torch.testing.assert_close(found["guide"][0](), expected, rtol=1e-4, atol=1e-4)
        found["GISTEmbedLoss"] = step(lambda: plain(features, None)), 1.0
    if size > 2048:
        return found
    rows = queries[:CACHED_ROWS].detach().requires_grad_()
    cached = CachedGISTEmbedLoss(**gist, mini_batch_size=32)
    guides = [[guided[0][:CACHED_ROWS]], [guided[1]]]
    run = step(lambda: cached.calculate_loss([[rows], [documents]], guides, with_backward=True))
    found["CachedGISTEmbedLoss"] = run, size / len(rows)
    return found


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    rows = []
    for size, repeats in REPEATS.items():
        found = steps(size)
        ours = {name: step for name, (step, _) in found.items() if "GIST" not in name}
        theirs = {name: step for name, (step, _) in found.items() if "GIST" in name}
        measured = seconds(ours, repeats, clock=time.process_time)
        measured |= seconds(theirs, 1, clock=time.process_time)
        memory = {name: peak_bytes(step) for name, (step, _) in found.items()}
        for name, (_, times) in found.items():
            time_ = measured[name] * times
            row = [f"{time_ * 1e3:.0f}", f"{time_ / measured['no mask']:.2f}"]
            row += [f"{memory[name] / MIB:.0f}", f"{memory[name] / memory['no mask']:.2f}"]
            rows.append([size, name, *row])
    print("\n".join(markdown(["B", "loss", "ms", "time", "MiB", "memory"], rows, "rl")))


if __name__ == "__main__":
    main()
