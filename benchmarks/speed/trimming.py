"""Time and memory of a training step with all rows of the word table and with those that are used.

    OMP_NUM_THREADS=1 python benchmarks/speed/trimming.py

Batches of 32 pairs of texts of 24 words, of 5,000 words; AdamW, fused, one thread. ``ms`` are
processor milliseconds of a step after the first two. ``MiB`` is the peak of the process beyond what
it had before the training; each training has a process of its own. Weights are random, because
neither figure depends on them. Expected: a static table saves most of its time; an encoder saves
12 bytes for each weight of a row that is not used, and the time that the optimizer takes for it.
"""

import random
import tempfile
import time
from contextlib import nullcontext

import torch
from benchmarks.speed.memory import MIB, in_a_process, process_peak
from benchmarks.studies.estimates import markdown
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    BertConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

import st_magnitude as stm

# name -> rows and width of the table, layers
SHAPES = {
    "static table": (32_000, 256, 0),
    "6 layers, as all-MiniLM-L6": (30_522, 384, 6),
    "12 layers, as multilingual-e5-small": (250_037, 384, 12),
    "12 layers, as multilingual-e5-base": (250_002, 768, 12),
}
STEPS = 6


def model_of(
    rows: int, width: int, layers: int, tokenizer: PreTrainedTokenizerFast | None = None
) -> SentenceTransformer:
    """A model with random weights; one with layers may have a tokenizer of fewer tokens."""
    if not layers:
        table = StaticEmbedding(by_word(rows), embedding_dim=width)
        return SentenceTransformer(modules=[table], device="cpu")
    heads = {"num_hidden_layers": layers, "num_attention_heads": 12, "intermediate_size": 4 * width}
    return encoder_of(BertConfig(vocab_size=rows, hidden_size=width, **heads), tokenizer)


def by_word(rows: int) -> Tokenizer:
    """A tokenizer of the words w2, w3, ..."""
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, rows)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def encoder_of(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerFast | None = None,
    attention: str = "sdpa",
) -> SentenceTransformer:
    """The mean of the last layer of a model with random weights."""
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if tokenizer is None:
        words = by_word(config.vocab_size)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **named)
    with tempfile.TemporaryDirectory() as folder:
        AutoModel.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder, model_kwargs={"attn_implementation": attention})
    modules = [transformer, Pooling(config.hidden_size)]
    return SentenceTransformer(modules=modules, device="cpu")


class Clock(TrainerCallback):
    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == 2:
            self.began = time.process_time()
        self.ended = time.process_time()


def measure(name: str, trims: bool) -> tuple[float, float]:
    """Milliseconds of a step, and MiB."""
    torch.set_num_threads(1)
    model = model_of(*SHAPES[name])
    draw = random.Random(0)
    used = range(2, SHAPES[name][0], SHAPES[name][0] // 5_000)
    texts = [" ".join(f"w{draw.choice(used)}" for _ in range(24)) for _ in range(64 * STEPS)]
    half = len(texts) // 2
    data = Dataset.from_dict({"anchor": texts[:half], "positive": texts[half:]})
    options = {"per_device_train_batch_size": 32, "save_strategy": "no", "report_to": []}
    options |= {"use_cpu": True, "disable_tqdm": True, "max_steps": STEPS}
    with tempfile.TemporaryDirectory() as output:
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(output, **options),
            data,
            loss=stm.CosineRankingLoss(model),
            callbacks=[clock := Clock()],
        )
        before = process_peak()
        with stm.trimmed_vocabulary(trainer) if trims else nullcontext():
            trainer.train()
    milliseconds = 1000 * (clock.ended - clock.began) / (STEPS - 2)
    return milliseconds, (process_peak() - before) / MIB


def main() -> None:
    rows = []
    for name, (num_rows, width, _) in SHAPES.items():
        whole, trimmed = (in_a_process(measure, name, trims) for trims in (False, True))
        figures = [f"{x:,.0f}" for x in (whole[0], trimmed[0], whole[1], trimmed[1])]
        rows.append([name, f"{num_rows:,} x {width}", *figures])
        print(rows[-1], flush=True)
    print("\n".join(markdown(["", "table", "ms", "trimmed", "MiB", "trimmed"], rows)))


if __name__ == "__main__":
    main()
