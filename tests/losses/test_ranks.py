"""Losses whose negatives come from all ranks, on gloo processes as DDP wraps their models."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from _losses import TWICE, assert_same_gradients, batch_of, gradients
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, auto_scale, formula, load_transformer, raw_embeddings
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

pytestmark = needs_fork

GATHERING_LOSSES = {
    "qnorm": stm.QNormRankingLoss,
    "learnable": stm.LearnableNormLoss,
    "temp_agg_mrl": partial(stm.TempAggMRLLoss, similarity="qnorm"),
}
# where the rows of each rank start
STARTS = {"equal": (0, 4, 8, 12, 16), "unequal": (0, 6, 10, 15, 16)}
# (loss, mini_batch_size, direction)
CASES = [
    ("qnorm", None, ("query_to_doc",)),
    ("qnorm", 3, ("query_to_doc", "doc_to_query")),
    ("learnable", 3, ("query_to_doc",)),
    ("learnable", None, ("query_to_doc", "doc_to_query")),
    ("temp_agg_mrl", None, ("query_to_doc", "doc_to_query")),
    ("temp_agg_mrl", 3, ("doc_to_query",)),
]


def features(model, rows):
    return batch_of(model, [row[:3] for row in rows])


def wrapped(folder, case, dtype, **options):
    """A loss around a model as the Trainer wraps it."""
    name, mini_batch_size, direction = case
    model = load_transformer(folder)
    loss = GATHERING_LOSSES[name](
        model,
        mini_batch_size=mini_batch_size,
        directions=direction,
        partition_mode="per_direction",
        gather_across_devices=True,
        same_text="exclude",
        **options,
    )
    loss.to(dtype)
    loss.model = DistributedDataParallel(model, find_unused_parameters=mini_batch_size is None)
    return model, loss


def one_batch(folder, case, kind):
    """Loss and gradient of one batch, and the gradient accumulated over two."""
    model, loss = wrapped(folder, case, torch.float64)
    rows = ROWS[STARTS[kind][dist.get_rank()] : STARTS[kind][dist.get_rank() + 1]]
    found = []
    for micro_batches in (1, 2):
        model.zero_grad()
        for synchronised in [False, True][-micro_batches:]:
            with nullcontext() if synchronised else loss.model.no_sync():
                value = loss(features(model, rows))
                value.backward()
        found.append(gradients(model))
    return value.item(), *found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, folder):
    """The results of each rank for each case and kind of sizes."""
    keys = list(itertools.product(CASES, STARTS))
    return on_ranks(request.param, lambda: {key: one_batch(folder, *key) for key in keys})


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", STARTS)
def test_ranks_are_one_process_on_the_joined_batch(model, ranks, case, kind):
    name, _, direction = case
    exponents = (1, 0)
    if name == "learnable":
        model.append(ExponentNorm(0.5, 0.5, learnable=True).double())
        exponents = model[-1].similarity.gamma_query, model[-1].similarity.gamma_document
    model.double()
    values, of_once, accumulated = zip(*(rank[case, kind] for rank in ranks), strict=True)
    embeddings = raw_embeddings(model, features(model, ROWS[: STARTS[kind][len(ranks)]]))
    columns = embeddings[: 2 if direction == ("doc_to_query",) else None]
    scale = auto_scale(columns, exponents)  # of the joined batch
    parts = [(32, 0.05)]
    if name == "temp_agg_mrl":
        parts = itertools.product((8, 16, 32), (0.03, 0.06, 0.1))
    expected = sum(
        formula(embeddings, exponents, scale * 0.05 / tau, direction, dim) for dim, tau in parts
    )
    expected.backward()
    assert len(set(values)) == len(values)
    assert sum(values) / len(values) == pytest.approx(expected.item(), rel=1e-10)
    for once, twice in zip(of_once, accumulated, strict=True):
        assert once.keys() == dict(model.named_parameters()).keys()
        assert_same_gradients(once, gradients(model), rtol=1e-7, atol=1e-11)
        assert_same_gradients(twice, gradients(model), 2, rtol=1e-7, atol=1e-11)


def refusals(folder):
    """The errors of batches that do not fit."""
    rank, messages = dist.get_rank(), []
    for columns in (3 - rank, 2 - rank):
        model, loss = wrapped(folder, CASES[0], torch.float32)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            loss(features(model, ROWS[:4])[:columns])
        messages.append(str(caught.value))
    return messages


def test_refusals(folder):
    errors, other_errors = on_ranks(2, lambda: refusals(folder))
    assert errors[0] == other_errors[0]
    assert "the batch of rank 0 has 3 columns and the batch of rank 1 has 2" in errors[0]
    assert "rank 1 was refused" in errors[1]
    assert "needs at least two text columns" in other_errors[1]


SHARED = [*TWICE, (ROWS[7][0], ROWS[0][1], "see below")]  # the two parts have texts in common
COUNTS = (
    {ROWS[0][1]: 9, ROWS[1][1]: 4, ROWS[2][1]: 1, "lima": 30, "see below": 2},
    {"see below": 50, "returns a list": 3},
)
RULES = [
    {"same_text": "exclude"},
    {"same_text": "once"},
    {"margin": 0.1, "margin_strategy": "relative"},
    {"margin": 0.3, "keep_explicit_negatives": True},
    {"prior": COUNTS},
]
RANDOM = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
LABELS = {
    "weights": torch.rand(8, **RANDOM),
    "classes": torch.tensor([4, 7, 4, 9, 7, 4, 9, 4]),
    "scores": torch.randn(8, 2, **RANDOM),
    "embeddings": torch.randn(8, 3, 5, **RANDOM) / 5,
}
WAYS = [(None, ("query_to_doc", "doc_to_query")), (3, ("query_to_doc",))]
RULES += [{"labels": kind} for kind in LABELS]
OF_TEXTS = [(rule, *way) for rule, way in itertools.product(RULES, WAYS)]
JOINT = {"same_text": "once", "partition_mode": "joint"}
OF_TEXTS.append((JOINT, None, ("query_to_doc", "query_to_query", "doc_to_doc")))


def of_texts(folder, case, part):
    """Value and gradients for some of the rows, by a model in DDP if there are processes."""
    options, mini_batch_size, direction = case
    model, labels = load_transformer(folder).double(), None
    batch = features(model, SHARED[part])
    options = dict(options)
    if "labels" in options:
        labels = LABELS[options["labels"]][part]
        if options["labels"] not in ("weights", "classes"):
            options |= {"labels": "teacher", "teacher_weight": 0.7}
    if "prior" in options:
        options["prior"] = stm.DocumentPrior.from_texts(model, *options["prior"])
    options = {"partition_mode": "per_direction"} | options
    options |= {"directions": direction, "mini_batch_size": mini_batch_size}
    loss = stm.QNormRankingLoss(
        model, scale=3.0, **options, gather_across_devices=dist.is_initialized()
    )
    if dist.is_initialized():
        loss.model = DistributedDataParallel(model)
    value = loss(batch, labels)
    value.backward()
    return value.item(), gradients(model)


def parts_of_texts(folder):
    """Of five rows on one rank and three on the other."""
    part = slice(5, None) if dist.get_rank() else slice(5)
    return [of_texts(folder, case, part) for case in OF_TEXTS]


def test_rules_prior_and_labels_see_the_texts_of_all_ranks(folder):
    ranks = on_ranks(2, parts_of_texts, folder)
    for case, *found in zip(OF_TEXTS, *ranks, strict=True):
        value, expected = of_texts(folder, case, slice(None))
        assert sum(value for value, _ in found) / 2 == pytest.approx(value, rel=1e-7)
        for _, gradient in found:
            assert_same_gradients(gradient, expected, rtol=1e-6, atol=1e-9)


GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def gathered(folder):
    """Values and gradients of one rank by this package and by sentence-transformers."""
    model, found = load_transformer(folder), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    columns = [
        torch.randn(5, 32, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(4)
    ]
    for directions in (GTE[:1], GTE[::2], GTE):
        for loss_class in (stm.CosineRankingLoss, MultipleNegativesRankingLoss):
            loss = loss_class(model, gather_across_devices=True, directions=directions)
            value = loss.compute_loss_from_embeddings(columns, None)
            found.append([value.detach(), *torch.autograd.grad(value, columns)])
    return found


def test_gathered_directions_equal_sentence_transformers(folder):
    for found in on_ranks(2, gathered, folder):
        torch.testing.assert_close(found[::2], found[1::2], rtol=1e-9, atol=1e-11)
