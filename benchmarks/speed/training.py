"""Time and memory of whole trainings: our loss and sentence-transformers' parts with and without
`trimmed_vocabulary`, and the same loss by hand.

    OMP_NUM_THREADS=1 python benchmarks/speed/training.py DATA

DATA has the files of BANKING77 (see benchmarks/data). A row is a question and another one of its
intent: three epochs of all 10,003 for wordllama's table, three steps for an encoder, on the rows of
these steps. A training is a process on one thread; the losses take turns, and the best of three
runs counts. ``seconds`` are processor seconds of the training, with tokenization and the reading of
a trimmed vocabulary; ``peak`` is what the process holds beyond its memory before; nDCG@10 is that
of test questions among training questions; ``apart`` is |w - w'| / |w' - w0| with the weights w' of
the first loss. Draws docs/training.png; benchmarks/studies/tables.py writes the table.

Expected before measuring:

- At 32 a table's steps are passes over V x D numbers (32,000 x 256): two dense gradients, clipping
  and AdamW, some 20 passes of 33 MB, 30 to 60 ms. So losses of one term are level, and with the
  tenth of the rows that the texts use 3 to 5 times as fast; at 256 twice; at 2,048, with 12 steps,
  level. There scores are the time, 6 B^2 D operations a product and passes over B^2 numbers.
- At 8,192 one term takes .6 of MNRL's time and a fifth of its memory; nine take an eighth of the
  composition's, which encodes three times, a twelfth of its memory, a third of the time by hand.
- sentence-transformers' parts gain as much from trimming as ours.
- Encoders are level but for the composition of nine terms. Trimming saves 12 bytes a weight, 120
  MiB and 1.1 GiB, and 5 and 10 % of the time at 32, half of that at 64.
- Trimmed weights are equal to the last bit. Others differ by rounding, which AdamW's first steps
  magnify where a gradient is about 0: .001 to .01 apart, nDCG@10 equal to three digits.
"""

import hashlib
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import sentence_transformers as st
import torch
import torch.nn.functional as F
from benchmarks.data import banking77
from benchmarks.data.intents import find_questions, question_pairs, split_off
from benchmarks.speed.memory import MIB, forget_peak, in_a_process, process_peak
from benchmarks.speed.trimming import SHAPES, model_of
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import QUIET, minilm, static_model
from benchmarks.studies.store import Store
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses as theirs
from torch import nn
from torch.nn.utils import parameters_to_vector

import st_magnitude as stm

TABLE, MINILM, MULTILINGUAL = "static table", "all-MiniLM-L6", "12 layers, as multilingual-e5-small"
BATCHES = {TABLE: (32, 256, 2048, 8192), MINILM: (32, 64), MULTILINGUAL: (32, 64)}
SETTINGS = [(model, batch, n) for model in BATCHES for batch in BATCHES[model] for n in (1, 9)]
PARTS, BY_HAND, OURS, TRIMMED = "sentence-transformers", "by hand", "st_magnitude", "trimmed"
PARTS_TRIMMED = "sentence-transformers, trimmed"
COLORS = {PARTS: "#9aa0a6", PARTS_TRIMMED: "#5f6368", BY_HAND: "#f29900"}
COLORS |= {OURS: "#8ab4f8", TRIMMED: "#1a73e8"}
SHOWN = {"steps": ",", "seconds": ".1f", "peak": ",.0f", "ndcg": ".4f"}
TAUS = (0.03, 0.06, 0.1)


@dataclass(frozen=True)
class Cell:
    model: str
    batch: int
    terms: int  # 1, or 9: three prefixes at three temperatures
    loss: str
    run: int = 0
    data: str = "BANKING77"


STORE = Store(Path(__file__).with_name("training.jsonl"), Cell)


class Sum(nn.Module):
    """Nine terms of sentence-transformers' parts."""

    def __init__(self, model: st.SentenceTransformer, dims: list[int]) -> None:
        super().__init__()
        self.model = model
        parts = [theirs.MultipleNegativesRankingLoss(model, scale=1 / tau) for tau in TAUS]
        self.parts = nn.ModuleList(theirs.MatryoshkaLoss(model, part, dims) for part in parts)

    def forward(self, features: list, labels: torch.Tensor | None = None) -> torch.Tensor:
        return sum(part([dict(column) for column in features], labels) for part in self.parts)


class ByHand(nn.Module):
    """One encoding, a product for each prefix, a softmax for each temperature."""

    def __init__(self, model: st.SentenceTransformer, dims: list[int], taus: tuple) -> None:
        super().__init__()
        self.model, self.dims, self.taus = model, dims, taus

    def forward(self, features: list, labels: torch.Tensor | None = None) -> torch.Tensor:
        queries, documents = embed_columns(self.model, features)
        own = torch.arange(len(queries))
        losses = []
        for dim in self.dims:
            scores = F.normalize(queries[:, :dim]) @ F.normalize(documents[:, :dim]).T
            losses += [F.cross_entropy(scores / tau, own) for tau in self.taus]
        return sum(losses)


def make_loss(model: st.SentenceTransformer, cell: Cell) -> nn.Module:
    width = model.get_embedding_dimension()
    dims, taus = ([width // 4, width // 2, width], TAUS) if cell.terms == 9 else ([width], (0.05,))
    if cell.loss == BY_HAND:
        return ByHand(model, dims, taus)
    if cell.loss in (PARTS, PARTS_TRIMMED):
        return Sum(model, dims) if cell.terms == 9 else theirs.MultipleNegativesRankingLoss(model)
    terms = [stm.Term(*term) for term in product(dims, taus)]
    return stm.CosineRankingLoss(model, terms=terms, same_text="keep")


def measure(folder: str, cell: Cell, work: str) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = (banking77.read(folder, split) for split in ("train", "test"))
    is_table = cell.model == TABLE
    rows = question_pairs(train).remove_columns("label")
    rows = rows if is_table else rows.shuffle(seed=0).select(range(3 * cell.batch))
    model = static_model() if is_table else minilm()
    if cell.model == MULTILINGUAL:
        model = model_of(*SHAPES[MULTILINGUAL], tokenizer=model.tokenizer)
    start = parameters_to_vector(model.parameters()).detach()
    loss = make_loss(model, cell)
    how = QUIET | {"num_train_epochs": 3 if is_table else 1, "use_cpu": True}
    how |= {"per_device_train_batch_size": cell.batch, "learning_rate": 0.03 if is_table else 2e-5}
    args = st.SentenceTransformerTrainingArguments(f"{work}/runs", **how)
    trainer = st.SentenceTransformerTrainer(model, args, rows, loss=loss)
    held = forget_peak()
    began, wall = time.process_time(), time.perf_counter()
    with stm.trimmed_vocabulary(trainer) if "trimmed" in cell.loss else nullcontext():
        trainer.train()
    figures = {"steps": trainer.state.global_step, "seconds": time.process_time() - began}
    figures |= {"wall": time.perf_counter() - wall, "peak": (process_peak() - held) / MIB}
    if not is_table:
        train, test = split_off(train, 1_000)[1], split_off(test, 300)[1]
    figures["ndcg"] = stm.encode(model, find_questions(test, train), "cosine").search(10).mean
    weights = parameters_to_vector(model.parameters()).detach()
    first = Path(work) / "weights.pt"
    figures["digest"] = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]
    if not first.exists():
        torch.save(weights, first)
    other = torch.load(first)
    figures["apart"] = float((weights - other).norm() / (other - start).norm())
    return figures


def best(setting: tuple[str, int, int]) -> list[dict]:
    """The best run of each loss, by processor seconds."""
    runs = [[STORE.load(Cell(*setting, loss, run)) for run in range(3)] for loss in COLORS]
    found = [[run for run in of_loss if run] for of_loss in runs]
    return [min(x, key=lambda run: run["seconds"]) for x in found if x]


def table() -> list[str]:
    head = ["", "batch", "terms", "steps", "processor s", "MiB", "nDCG@10"]
    rows = []
    for setting in SETTINGS:
        if setting[0] != TABLE or len(runs := best(setting)) < 4:
            continue
        shown = [[f"{run[name]:{form}}" for run in runs] for name, form in SHOWN.items()]
        figures = [" / ".join(x if len(set(x)) > 1 else x[:1]) for x in shown]
        apart = f"{max(run['apart'] for run in runs):.0e}"
        is_same = runs[-1]["digest"] == runs[-2]["digest"]
        rows.append([*setting, *figures, apart, "equal" if is_same else "not equal"])
    return markdown([*head, "apart", "trimmed"], rows)


def draw(file: Path) -> None:
    """Time and memory of the trainings of the static table."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, figsize=(7, 7), layout="constrained")
    keys = ("processor seconds", "seconds"), ("peak memory, MiB", "peak")
    names = {PARTS_TRIMMED: f"{PARTS}, trimmed vocabulary", TRIMMED: f"{OURS}, trimmed vocabulary"}
    for axis, (terms, (title, key)) in zip(axes, product((1, 9), keys), strict=True):
        for i, (loss, color) in enumerate(COLORS.items()):
            heights = [best((TABLE, batch, terms))[i][key] for batch in BATCHES[TABLE]]
            places = [place + 0.19 * (i - 2) for place in range(len(heights))]
            name = names.get(loss, loss)
            bars = axis.bar(places, heights, 0.19, color=color, label=name)
            axis.bar_label(bars, fmt="{:,.0f}", padding=1, fontsize=7)
        axis.set_title(f"{'One term' if terms == 1 else 'Nine terms'}: {title}", fontsize=10)
        axis.set_xticks(range(len(heights)), [f"batch {batch:,}" for batch in BATCHES[TABLE]])
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.margins(x=0.01, y=0.12)
    shown = axes[0].get_legend_handles_labels()
    figure.legend(*shown, frameon=False, fontsize=9, loc="outside upper center", ncols=2)
    figure.savefig(file, dpi=160, facecolor="white")


def main(folder: str) -> None:
    for run, setting in product(range(3), SETTINGS):
        losses = [x for x in COLORS if setting[0] == TABLE or x != PARTS_TRIMMED]
        cells = [Cell(*setting, loss, run) for loss in losses]
        with tempfile.TemporaryDirectory() as work:
            for cell in cells:
                if STORE.load(cell):
                    continue
                STORE.add(cell, in_a_process(measure, folder, cell, work))
                print(STORE.load(cell), flush=True)
    draw(Path("docs/training.png"))


if __name__ == "__main__":
    main(sys.argv[1])
