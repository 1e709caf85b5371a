"""RevelaLoss: Sim against a loop, the loss against the reference, and all ways into training."""

import logging

import pytest
import torch
from revela_reference import decoder, next_token_loss, streams
from revela_tiny import arguments, groups, language_model, loss_for, texts
from sentence_transformers import InputExample, SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from st_magnitude.revela import RevelaLoss, group_similarity


def test_similarity_is_a_softmax_over_the_others_of_the_group() -> None:
    torch.manual_seed(0)
    queries, passages = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    members, tau = [0, 1, 0, 0, 1, 2], 0.3
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for i, query in enumerate(queries.detach()):
        others = [j for j in range(6) if j != i and members[i] == members[j]]
        powers = [torch.exp(torch.cosine_similarity(query, passages[j], 0) / tau) for j in others]
        for j, power in zip(others, powers, strict=True):
            expected[i, j] = power.detach() / sum(powers)
    found = group_similarity(queries, passages, torch.tensor(members), tau)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *x: group_similarity(*x, torch.tensor(members), tau), (queries, passages)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarity_of_tiny_temperatures_is_finite_and_exact(dtype: torch.dtype) -> None:
    """At tau = 1e-4 a cosine in bfloat16 would be off by 39 logits, so autocast does not apply."""
    x = torch.randn(4, 64).to(dtype).requires_grad_()
    members = torch.tensor([0, 0, 0, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = group_similarity(x, x, members, 1e-4)
    (gradient,) = torch.autograd.grad((weights * torch.randn(4, 4)).sum(), x)
    assert torch.isfinite(gradient).all()
    assert weights.dtype == torch.float32
    assert torch.equal(weights, group_similarity(x, x, members, 1e-4))
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 1.0, 1.0, 0.0]))


@pytest.fixture
def lm() -> PreTrainedModel:
    return decoder(vocab_size=len(language_model()[1]))


def by_loops(lm: PreTrainedModel, texts: list[str], similarity: Tensor) -> list[Tensor]:
    """Next-token losses of both streams, from the loops over Eq. 3-8."""
    plain = decoder(vocab_size=lm.config.vocab_size)
    plain.load_state_dict(lm.state_dict())
    ids = [torch.tensor(language_model()[1](text)["input_ids"]) for text in texts]
    return [next_token_loss(plain, x, ids) for x in streams(plain, ids, similarity.double())]


@pytest.mark.parametrize("read_weight", [1.0, 0.3])
def test_the_loss_is_the_formula(
    model: SentenceTransformer, lm: PreTrainedModel, read_weight: float
) -> None:
    """Texts to loss: query halves and passages by the model itself, then the loops over Eq. 3-8."""
    loss = RevelaLoss(model, lm, language_model()[1], temperature=0.1, read_weight=read_weight)
    rows = list(groups(3))[:2]
    value = loss(loss.collator.features(rows))
    chunks = [text for row in rows for text in row["chunks"]]
    member = [number for number, row in enumerate(rows) for _ in row["chunks"]]
    halves = [" ".join(text.split()[: (len(text.split()) + 1) // 2]) for text in chunks]
    model.eval()
    queries = torch.tensor(model.encode(["Query: " + half for half in halves]))
    passages = torch.tensor(model.encode(["Passage: " + text for text in chunks]))
    similarity = group_similarity(queries, passages, torch.tensor(member), 0.1)
    _, expected = by_loops(lm, chunks, read_weight * similarity)
    torch.testing.assert_close(value, expected, rtol=0, atol=2e-5)  # the retriever is float32


def test_gains_compare_with_not_reading_and_with_uniform_weights(model, lm) -> None:
    """Logged in evaluation only, from the loops over Eq. 3-8."""
    loss = RevelaLoss(model, lm, language_model()[1], temperature=0.01)
    row = groups(3)[0]
    features = loss.collator.features([row])
    loss.train()
    lm.eval()  # as from_pretrained leaves it: without dropout and checkpointing
    loss(features)
    assert "reading_gain" not in loss.logs
    assert lm.training
    model.eval()
    reading = loss(features)
    assert not lm.training
    of_both = by_loops(lm, row["chunks"], (1 - torch.eye(3)) / 2)
    for name, expected in zip(("reading_gain", "choice_gain"), of_both, strict=True):
        assert abs(expected - reading) > 1e-5
        assert loss.logs[name].item() == pytest.approx((expected - reading).item(), abs=2e-5)


def test_what_was_trained_with_is_what_it_is_used_with(model, tmp_path) -> None:
    loss_for(model, prefixes=("ask: ", "tell: "))
    model.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"))
    assert again.similarity_fn_name == "cosine"
    expected = model.encode("ask: green tea", prompt="")
    assert abs(again.encode_query("green tea") - expected).max() < 1e-6
    assert again.prompts["document"] == "tell: "


def test_plain_trainer_with_the_collator(model: SentenceTransformer, tmp_path) -> None:
    loss = loss_for(model)
    before = {name: p.detach().clone() for name, p in loss.named_parameters()}
    SentenceTransformerTrainer(
        model, arguments(tmp_path), groups(), loss=loss, data_collator=loss.collator
    ).train()
    assert {"next_token", "one_hot"} == loss.logs.keys()
    moved = [name for name, p in loss.named_parameters() if not torch.equal(p, before[name])]
    assert {name.split(".")[0] for name in moved} == {"model", "lm"}


def test_fit(model: SentenceTransformer) -> None:
    """The columns of tokens that fit's collator makes give the loss of the collator of groups."""
    rows = [row["chunks"] for row in groups() if len(row["chunks"]) == 4]
    loss = loss_for(model)
    columns = [dict(model.preprocess(list(column))) for column in zip(*rows[:2], strict=True)]
    ids = [model.tokenizer(row)["input_ids"] for row in rows[:2]]
    texts = [model.tokenizer.batch_decode(row, skip_special_tokens=True) for row in ids]
    expected = loss(loss.collator.features([{"chunks": row} for row in texts]))
    torch.testing.assert_close(loss(columns), expected)
    before = model.encode("Query: green tea")
    objectives = [(DataLoader([InputExample(texts=row) for row in rows], batch_size=2), loss)]
    model.fit(objectives, steps_per_epoch=2, show_progress_bar=False, optimizer_params={"lr": 1e-2})
    assert abs(model.encode("Query: green tea") - before).max() > 1e-4


def test_warns_when_rows_are_one_hot(model: SentenceTransformer, caplog) -> None:
    loss = loss_for(model, temperature=1e-4)
    with caplog.at_level(logging.WARNING, logger="st_magnitude"):
        for _ in range(2):
            loss(loss.collator.features([groups()[0]]))
    assert caplog.text.count("one-hot at temperature=0.0001") == 1
    assert loss.logs["one_hot"] > 0.9


def test_rows_that_are_no_groups_are_refused(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="whole groups"):
        loss_for(model)([dict(model.preprocess(texts()[:3]))])
