"""REPLUG against loops over the formulas of A.3, one pair after the other, and what must hold of it in training."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import _tiny
import pytest
import torch
from _tiny import tokenizer
from datasets import Dataset
from revela_reference import VOCABULARY, decoder, padded
from sentence_transformers import (
    InputExample,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from st_magnitude.revela import ReplugLoss, RevelaTrainer
from st_magnitude.revela.attention import attach
from st_magnitude.revela.groups import split_batch
from st_magnitude.revela.replug import continuation_losses, divergence
from st_magnitude.revela.score_cache import ScoreCache

TEA = [
    "two minutes are enough for green tea",
    "the pole is south of the penguins",
    "a sorted list",
    "short waves of light are blue",
]
EGGS = ["put the egg in hot water for six minutes", "lima", "rows of one table are joined"]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Everything here is tiny."""


@pytest.fixture
def lm() -> PreTrainedModel:
    return language_model()


def language_model(seed: int = 1, dropout: float = 0.5, family: str = "llama") -> PreTrainedModel:
    """A random one for the words of _tiny.py, in training mode, with dropout."""
    options = {"max_position_embeddings": 128, "attention_dropout": dropout}
    return _tiny.decoder(family, seed, std=0.3, **options).train()


def replug(model: SentenceTransformer, lm: nn.Module, **options) -> ReplugLoss:
    return ReplugLoss(model, lm, tokenizer(), **({"max_length": 32} | options))


def features(loss: ReplugLoss, *groups: list[str]) -> list[dict[str, Tensor]]:
    return split_batch(loss.collator([{"chunks": group} for group in groups]))


class Calls:
    """Sequences that went through a language model, pass by pass."""

    def __init__(self, lm: nn.Module) -> None:
        self.passes: list[int] = []
        base = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
        base.get_decoder().register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        self.passes.append(len(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))

    def __len__(self) -> int:
        return len(self.passes)


def loop(lm: PreTrainedModel, prefix: list[int], continuation: list[int]) -> float:
    """-log g(continuation | prefix): the plain model on both, one after the other."""
    with torch.no_grad():
        logits = lm(torch.tensor([[*prefix, *continuation]])).logits[0].double()
    total = 0.0
    for place, token in enumerate(continuation):
        before = logits[len(prefix) + place - 1]
        total -= float(before[token] - before.logsumexp(0))
    return total


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def documents(seed: int = 0, lengths: tuple[int, ...] = (5, 3, 1, 7, 2)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


# Scores ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs_per_batch", [1, 3, 16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "window", "attached"])
def test_scores_are_those_of_the_plain_model_on_both_texts(family: str, pairs_per_batch: int) -> None:
    lm = decoder({"window": "mistral", "attached": "llama"}.get(family, family))
    if family == "window":
        lm.config.sliding_window = 3
    docs = documents()
    pairs = [(i, j) for i, j in itertools.product(range(5), range(5)) if (i + 2 * j) % 4]
    expected = torch.tensor([loop(lm, docs[j], docs[i]) for i, j in pairs], dtype=torch.float64)
    if family == "attached":
        attach(lm)
    found = continuation_losses(lm, docs, docs, pairs, pairs_per_batch)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_window_of_the_test_above_matters() -> None:
    lm, docs = decoder("mistral"), documents()
    before = continuation_losses(lm, docs, docs, [(0, 3)])
    lm.config.sliding_window = 3
    assert (continuation_losses(lm, docs, docs, [(0, 3)]) - before).abs() > 1e-3


def test_many_tokens_are_scored_in_chunks(monkeypatch) -> None:
    lm, docs = decoder("llama"), documents()
    pairs = [(i, j) for i in range(5) for j in range(5)]
    whole = continuation_losses(lm, docs, docs, pairs)
    monkeypatch.setattr("st_magnitude.revela.replug.TOKENS_PER_CHUNK", 3)
    torch.testing.assert_close(continuation_losses(lm, docs, docs, pairs), whole, rtol=0, atol=1e-12)


def test_every_document_is_read_once_and_lent_to_its_continuations() -> None:
    lm, docs = decoder("llama"), documents()
    calls = Calls(lm)
    continuation_losses(lm, docs, docs, [(i, j) for i in range(5) for j in range(5) if i != j and i != 2])
    assert calls.passes[0] == 5  # all documents
    assert sorted(calls.passes[1:]) == [3, 3, 3, 3, 4]  # 3 others or, after the document that has no others, 4


def test_an_empty_continuation_costs_nothing_and_an_empty_prefix_is_refused() -> None:
    lm = decoder("llama")
    assert continuation_losses(lm, [[5]], [[], [6]], [(0, 0), (1, 0)])[0] == 0
    with pytest.raises(ValueError, match="Document 1 has no tokens"):
        continuation_losses(lm, [[5], []], [[5], [6]], [(0, 1)])


def test_a_model_that_overflows_is_named() -> None:
    lm = decoder("llama")
    with torch.no_grad():
        lm.lm_head.weight[7] = math.inf
    with pytest.raises(ValueError, match=r"document 1 after document 0 .* torch\.float64.*float32"):
        continuation_losses(lm, [[5]], [[6], [6, 8]], [(1, 0)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(model, side: str) -> None:
    lm, docs = decoder("llama"), documents()
    loss = replug(model, lm, per_token=False)
    ids, mask = padded([torch.tensor(x) for x in docs], side, extra=4)
    ids = ids.masked_fill(mask == 0, 9)  # a token like any other
    found, _ = loss.losses(ids, mask, torch.ones(5, 5, dtype=torch.bool))
    expected = torch.tensor([[loop(lm, before, after) for before in docs] for after in docs], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_scores_are_nats_a_token_or_a_document(model) -> None:
    lm, docs = decoder("llama"), documents()
    ids, mask = padded([torch.tensor(x) for x in docs])
    every = torch.ones(5, 5, dtype=torch.bool)
    summed, _ = replug(model, lm, per_token=False).losses(ids, mask, every)
    mean, _ = replug(model, lm).losses(ids, mask, every)
    torch.testing.assert_close(mean, summed / mask.sum(1, keepdim=True), rtol=1e-12, atol=0)


def test_marks_of_begin_and_end_do_not_come_between_two_documents(model) -> None:
    lm, loss = decoder("llama"), replug(model, decoder("llama"), per_token=False)
    loss.collator.lm_tokenizer.bos_token, loss.collator.lm_tokenizer.eos_token = "[CLS]", "[SEP]"
    begin, end = loss.collator.lm_tokenizer.bos_token_id, loss.collator.lm_tokenizer.eos_token_id
    assert {begin, end} == {2, 3}
    docs = [[begin, 8, 9, end], [begin, 10, 11, 12, end]]
    ids, mask = padded([torch.tensor(x) for x in docs])
    found, _ = loss.losses(ids, mask, ~torch.eye(2, dtype=torch.bool))
    assert float(found[1, 0]) == pytest.approx(loop(lm, [begin, 8, 9], [10, 11, 12]), abs=1e-10)
    assert float(found[0, 1]) == pytest.approx(loop(lm, [begin, 10, 11, 12], [8, 9]), abs=1e-10)
    loss.per_token = True
    again, _ = loss.losses(ids, mask, ~torch.eye(2, dtype=torch.bool))
    torch.testing.assert_close(again[1], found[1] / 3)


def test_autocast_does_not_reach_the_language_model(model, lm) -> None:
    loss, other = replug(model, lm), replug(model, lm)
    ids, mask = (features(loss, TEA)[2][key] for key in ("input_ids", "attention_mask"))
    every = torch.ones(4, 4, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = loss.losses(ids, mask, every)
    assert torch.equal(inside, other.losses(ids, mask, every)[0])


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_is_the_formula(model, include_self: bool, per_token: bool) -> None:
    lm = language_model(dropout=0.0).double()
    options = {"retriever_temperature": 0.3, "lm_temperature": 0.7 if per_token else 2.0}
    loss = replug(model.double(), lm, include_self=include_self, per_token=per_token, **options)
    columns = features(loss, TEA, EGGS)
    queries, passages = (model(dict(column))["sentence_embedding"].tolist() for column in columns[:2])
    docs = [x[m.bool()].tolist() for x, m in zip(columns[2]["input_ids"], columns[2]["attention_mask"], strict=True)]
    place = [0] * 4 + [1] * 3
    total = 0.0
    for i in range(7):
        others = [j for j in range(7) if place[i] == place[j] and (include_self or i != j)]
        cosines = [
            sum(a * b for a, b in zip(queries[i], passages[j], strict=True))
            / math.sqrt(sum(a * a for a in queries[i]) * sum(b * b for b in passages[j]))
            for j in others
        ]
        losses = [loop(lm, docs[j], docs[i]) / (len(docs[i]) if per_token else 1) for j in others]
        theirs = softmax([cosine / options["retriever_temperature"] for cosine in cosines])
        target = softmax([-value / options["lm_temperature"] for value in losses])
        total += sum(p * math.log(p / q) for p, q in zip(target, theirs, strict=True))
    assert loss(columns).item() == pytest.approx(total / 7, rel=1e-9)
    assert total > 0.1


def test_gradcheck_of_the_divergence() -> None:
    x, y = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    candidates = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).bool() & ~torch.eye(5, dtype=torch.bool)
    losses = torch.rand(5, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, y: divergence(x, y, losses, candidates, 0.5, 0.2).kl, (x, y))


def test_distributions_are_rows_over_the_candidates() -> None:
    x, losses = torch.randn(4, 3), torch.rand(4, 4)
    candidates = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    result = divergence(x, x.flip(0), losses, candidates, 0.1, 0.1)
    for weights in (result.target, result.predicted):
        torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 1.0, 1.0, 0.0]))
        assert not weights[~candidates].any()
        assert not weights.requires_grad
    alone = divergence(x[:3], x.flip(0)[:3], losses[:3, :3], candidates[:3, :3], 0.1, 0.1)
    torch.testing.assert_close(result.kl, alone.kl)  # a document without candidates does not count


def test_nobody_in_the_batch_has_company() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    result = divergence(x, x, torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool), 0.1, 0.1)
    result.kl.backward()
    assert result.kl == 0
    assert not x.grad.any()


def test_what_is_no_candidate_is_not_read() -> None:
    x, losses = torch.randn(4, 3), torch.rand(4, 4)
    candidates = ~torch.eye(4, dtype=torch.bool)
    other = losses + torch.eye(4) * 100
    assert torch.equal(
        divergence(x, x, losses, candidates, 0.1, 0.1).kl, divergence(x, x, other, candidates, 0.1, 0.1).kl
    )


def test_extreme_temperatures_stay_finite() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    result = divergence(x, x, 500 * torch.rand(4, 4), ~torch.eye(4, dtype=torch.bool), 1e-4, 1e-4)
    result.kl.backward()
    assert result.kl.isfinite()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def test_softmaxes_are_float32_under_autocast() -> None:
    x, losses, candidates = torch.randn(6, 8), torch.rand(6, 6), ~torch.eye(6, dtype=torch.bool)
    outside = divergence(x, x, losses, candidates, 0.001, 0.001)
    with torch.autocast("cpu", torch.bfloat16):
        inside = divergence(x, x, losses, candidates, 0.001, 0.001)
    assert inside.kl.dtype == torch.float32
    assert torch.equal(inside.kl, outside.kl)


def test_groups_do_not_mix(model, lm) -> None:
    loss = replug(model, lm)
    apart = [loss(features(loss, group)) for group in (TEA, EGGS)]
    together = loss(features(loss, TEA, EGGS))
    torch.testing.assert_close(together, (4 * apart[0] + 3 * apart[1]) / 7, rtol=1e-4, atol=1e-6)


def test_the_target_does_not_depend_on_the_retriever_and_the_gradient_reaches_it(model, lm) -> None:
    loss = replug(model, lm)
    loss(features(loss, TEA)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert any(parameter.grad.any() for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in lm.parameters())


# The frozen language model --------------------------------------------------------------------------------------------


def test_the_language_model_is_frozen_and_stays_without_dropout(model, lm) -> None:
    loss = replug(model, lm)
    loss.train()
    assert loss.training
    assert model.training
    assert not any(module.training for module in lm.modules())
    assert not any(parameter.requires_grad for parameter in lm.parameters())
    lm.train()  # somebody else
    text = features(loss, TEA)[2]
    every = torch.ones(4, 4, dtype=torch.bool)
    found, _ = loss.losses(text["input_ids"], text["attention_mask"], every)
    again, _ = replug(model, lm.eval()).losses(text["input_ids"], text["attention_mask"], every)
    assert torch.equal(found, again)


# The cache ------------------------------------------------------------------------------------------------------------


def test_what_is_known_is_not_asked_again(model, lm) -> None:
    loss, calls = replug(model, lm), Calls(lm)
    first = loss(features(loss, TEA))
    asked = len(calls)
    assert asked == 5  # the documents, and the continuations of each
    assert torch.equal(loss(features(loss, TEA)), first)
    loss(features(loss, TEA[::-1]))
    assert len(calls) == asked
    loss(features(loss, [*TEA[:3], EGGS[0]]))
    assert sorted(calls.passes[asked:]) == [1, 1, 1, 3, 4]  # three known documents, each before the new one; the new
    assert len(loss.cache) == 12 + 6


def test_runs_share_the_answers_of_one_language_model(model, lm, tmp_path) -> None:
    loss = replug(model, lm, cache_dir=tmp_path / "scores")
    expected, calls = loss(features(loss, TEA)), Calls(lm)
    again = replug(model, lm, cache_dir=tmp_path / "scores")
    assert torch.equal(again(features(again, TEA)), expected)
    third = replug(model, lm, cache_dir=tmp_path / "scores", per_token=False, lm_temperature=3.0, max_length=30)
    third(features(third, TEA))
    assert not len(calls)
    own = replug(model, lm)  # in memory
    own(features(own, TEA))
    assert len(calls)


def changed(lm: PreTrainedModel, how: str) -> PreTrainedModel:
    if how == "weights":
        with torch.no_grad():
            list(lm.parameters())[-2].mul_(1.5)
    elif how == "dtype":
        lm = lm.bfloat16()
    elif how == "config":
        lm.config.rms_norm_eps = 0.1
    return lm


@pytest.mark.parametrize("how", ["weights", "dtype", "config"])
def test_another_language_model_finds_no_answers(model, how: str, tmp_path) -> None:
    loss = replug(model, language_model(), cache_dir=tmp_path)
    loss(features(loss, TEA))
    other = changed(language_model(), how)
    calls = Calls(other)
    loss = replug(model, other, cache_dir=tmp_path)
    loss(features(loss, TEA))
    assert len(calls) == 5
    assert len(loss.cache) == 2 * 12


def test_the_same_language_model_from_elsewhere_finds_them(model, lm, tmp_path) -> None:
    loss = replug(model, lm, cache_dir=tmp_path / "scores")
    loss(features(loss, TEA))
    lm.save_pretrained(tmp_path / "lm")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    attach(other)
    calls, loss = Calls(other), replug(model, other, cache_dir=tmp_path / "scores")
    loss(features(loss, TEA))
    assert not len(calls)


def test_before_and_after_are_two_things(model) -> None:
    lm, docs = decoder("llama"), documents()
    loss = replug(model, lm, per_token=False)
    ids, mask = padded([torch.tensor(x) for x in docs[:2]])
    one = torch.tensor([[False, True], [False, False]])
    forward, known = loss.losses(ids, mask, one)
    assert known == 0.0
    assert float(forward[0, 1]) == pytest.approx(loop(lm, docs[1], docs[0]), abs=1e-10)
    both, known = loss.losses(ids, mask, one | one.T)
    assert known == 0.5
    assert float(both[1, 0]) == pytest.approx(loop(lm, docs[0], docs[1]), abs=1e-10)
    assert both[0, 1] == forward[0, 1]


def broken(folder: Path, how: str) -> None:
    file = folder / ScoreCache.FILE
    if how == "garbage":
        file.write_bytes(b"these are no scores " * 100)
    elif how == "foreign":
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE score (name TEXT)")
    elif how == "torn":
        ScoreCache(folder).put({str(number).encode(): 1.0 for number in range(5000)})
        content = file.read_bytes()
        file.write_bytes(content[:4096] + bytes(len(content) - 8192))
    elif how == "folder":
        file.mkdir()


@pytest.mark.parametrize("how", ["garbage", "foreign", "torn", "folder"])
def test_a_broken_or_foreign_file_is_named(model, lm, how: str, tmp_path) -> None:
    broken(tmp_path, how)
    with pytest.raises(ValueError, match=r"lm_scores.sqlite, cannot be used: .*cache_dir"):
        replug(model, lm, cache_dir=tmp_path).cache.get([b"1", b"2"])


def test_a_file_in_place_of_the_folder_is_named(model, lm, tmp_path) -> None:
    (tmp_path / "scores").write_text("mine")
    with pytest.raises(ValueError, match=r"scores.*cannot be used"):
        replug(model, lm, cache_dir=tmp_path / "scores")
    assert (tmp_path / "scores").read_text() == "mine"


def test_a_loss_can_be_copied_and_pickled(model, lm, tmp_path) -> None:
    for folder, kept in ((None, 0), (tmp_path, 12)):
        loss = replug(model, lm, cache_dir=folder)
        loss(features(loss, TEA))
        assert len(copy.deepcopy(loss).cache) == kept
        assert len(pickle.loads(pickle.dumps(loss.cache))) == kept
        assert len(loss.cache) == 12


# Training -------------------------------------------------------------------------------------------------------------


def arguments(folder: Path, **options) -> SentenceTransformerTrainingArguments:
    defaults = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 15,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return SentenceTransformerTrainingArguments(str(folder), **(defaults | options))


def groups() -> Dataset:
    return Dataset.from_list([{"chunks": TEA}, {"chunks": EGGS}])


@pytest.mark.parametrize("trainer", [RevelaTrainer, SentenceTransformerTrainer])
def test_a_retriever_learns_to_rank_like_the_language_model(model, lm, trainer: Callable, tmp_path) -> None:
    loss = replug(model, lm, lm_temperature=0.3, query_part="full", cache_dir=tmp_path / "scores")
    before, calls = copy.deepcopy(lm.state_dict()), Calls(lm)
    options = {} if trainer is RevelaTrainer else {"data_collator": loss.collator}
    run = trainer(
        model=model,
        args=arguments(tmp_path, save_strategy="steps", save_steps=15),
        loss=loss,
        train_dataset=groups(),
        **options,
    )
    logs = []
    loss.register_forward_hook(lambda *_: logs.append({name: float(value) for name, value in loss.logs.items()}))
    run.train()
    assert len(logs) == 15
    assert logs[-1]["kl"] < 0.3 * logs[0]["kl"]
    assert logs[0].keys() == {"kl", "one_hot", "target_entropy", "retriever_entropy", "cached"}
    assert [entry["cached"] for entry in logs] == [0.0] + [1.0] * 14
    logged = [entry for entry in run.state.log_history if "kl" in entry]
    assert len(logged) == (15 if trainer is RevelaTrainer else 0)
    for entry, value in zip(logged, logs, strict=False):
        assert {name: entry[name] for name in value} == pytest.approx(value, abs=1e-4)
    assert len(calls) == 1 + 7  # all documents at once, then the continuations of each: in the first epoch only
    assert before.keys() == lm.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    saved = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert "model.safetensors" in saved
    assert "language_model.safetensors" not in saved
    weights = (tmp_path / "checkpoint-15" / "model.safetensors").stat().st_size
    assert weights < 1.1 * sum(p.numel() * 4 for p in model.parameters()) + 20_000
    reloaded = SentenceTransformer(str(tmp_path / "checkpoint-15"), device="cpu")
    assert reloaded.prompts["query"] == "Query: "
    assert reloaded.similarity_fn_name == "cosine"


def test_mixed_precision_and_checkpointing(model, lm, tmp_path) -> None:
    loss = replug(model, lm, lm_temperature=0.3)
    run = RevelaTrainer(
        model=model,
        args=arguments(tmp_path, bf16=True, gradient_checkpointing=True, num_train_epochs=2),
        loss=loss,
        train_dataset=groups(),
        eval_dataset=groups(),
    )
    run.train()
    assert math.isfinite(run.state.log_history[0]["loss"])
    assert math.isfinite(run.evaluate()["eval_loss"])
    assert not any(parameter.requires_grad for parameter in run.lm.parameters())


def test_fit(model, lm, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.chdir(tmp_path)
    loss = replug(model, lm, lm_temperature=0.3)
    expected = loss.eval()(features(loss, TEA)).item()
    loader = DataLoader([InputExample(texts=TEA)], batch_size=1)
    seen = []
    loss.register_forward_hook(lambda module, inputs, output: seen.append(output.item()))
    with caplog.at_level(logging.WARNING, "st_magnitude"):
        model.fit(
            [(loader, loss)],
            epochs=12,
            warmup_steps=0,
            optimizer_params={"lr": 3e-3},
            show_progress_bar=False,
        )
    assert seen[0] == pytest.approx(expected, rel=1e-4)
    assert seen[-1] < 0.5 * seen[0]
    assert "without capitals" in caplog.text


def test_rows_that_are_no_groups_are_refused(model, lm) -> None:
    loss = replug(model, lm)
    with pytest.raises(ValueError, match="ReplugLoss needs whole groups"):
        loss([model.preprocess(["a", "b"])])


# Settings -------------------------------------------------------------------------------------------------------------


def test_settings_are_told(model, lm) -> None:
    loss = replug(model, lm, prefixes=("q: ", "p: "))
    assert loss.get_config_dict() == {
        "lm": "LlamaForCausalLM",
        "retriever_temperature": loss.retriever_temperature,
        "lm_temperature": loss.lm_temperature,
        "query_part": loss.collator.query_part,
        "prefixes": ["q: ", "p: "],
        "max_length": 32,
        "include_self": False,
        "per_token": True,
    }
    assert model.prompts == {"query": "q: ", "document": "p: "}
    assert model.similarity_fn_name == "cosine"
    assert "2301.12652" in loss.citation
    assert "2506.16552" in loss.citation


def test_the_preset(model, lm) -> None:
    loss = ReplugLoss.preset("paper", model, lm, tokenizer(), max_length=32)
    assert (loss.retriever_temperature, loss.lm_temperature) == (0.001, 0.001)
    assert ReplugLoss.preset("paper", model, lm, tokenizer(), max_length=32, lm_temperature=1.0).lm_temperature == 1.0
    with pytest.raises(ValueError, match=r"There is no preset 'blog'; choose one of paper"):
        ReplugLoss.preset("blog", model, lm)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retriever_temperature": 0.0}, "retriever_temperature must be positive, got 0.0"),
        ({"lm_temperature": -1.0}, "lm_temperature must be positive, got -1.0"),
        ({"lm_temperature": math.nan}, "lm_temperature must be positive, got nan"),
        ({"lm_temperature": math.inf}, "lm_temperature must be positive, got inf"),
        ({"pairs_per_batch": 0}, "pairs_per_batch must be at least 1, got 0"),
        ({"max_length": 65}, r"Two documents of 65 tokens do not fit into the 128 positions.*max_length=64"),
        ({"query_part": "third"}, "query_part must be"),
        ({"lm_tokenizer": None}, "pass lm_tokenizer"),
    ],
)
def test_bad_settings_are_refused_and_leave_the_models_alone(model, lm, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ReplugLoss(model, lm, **({"lm_tokenizer": tokenizer(), "max_length": 32} | options))
    assert all(parameter.requires_grad for parameter in lm.parameters())
    assert model.prompts.get("query") != "Query: "


def test_a_model_with_another_memory_is_refused(model) -> None:
    lm = _tiny.decoder("lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM keeps other things .*LinearAttentionLayer"):
        replug(model, lm)


def test_a_frozen_retriever_is_named(model, lm) -> None:
    loss = replug(model.requires_grad_(False), lm).train()
    with pytest.raises(ValueError, match="nothing would learn"):
        loss(features(loss, TEA))
    with torch.no_grad():
        assert loss(features(loss, TEA)) > 0


@pytest.fixture
def warnings(caplog) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "st_magnitude"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_one_hot_targets_are_warned_of_once(model, lm, warnings) -> None:
    loss = replug(model, lm, lm_temperature=1e-5)
    for _ in range(2):
        loss(features(loss, TEA))
    assert len(warnings()) == 1
    assert "100% of the language model's rankings are one-hot at lm_temperature=1e-05" in warnings()[0]
    loss = replug(model, lm, lm_temperature=10.0)
    loss(features(loss, TEA))
    assert len(warnings()) == 1


def test_pairs_are_warned_of(model, lm, warnings) -> None:
    loss = replug(model, lm)
    assert loss(features(loss, TEA[:2])) == 0
    assert "Groups of two documents" in warnings()[0]
    loss = replug(model, lm, include_self=True)
    assert loss(features(loss, TEA[:2])) > 0
    assert len(warnings()) == 1
