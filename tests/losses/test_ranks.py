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
from st_magnitude.losses.ranks import Gathered
from st_magnitude.modules import ExponentNorm

pytestmark = needs_fork

GATHERING_LOSSES = {
    "qnorm": stm.QNormRankingLoss,
    "learnable": stm.LearnableNormLoss,
    "temp_agg_mrl": partial(stm.TempAggMRLLoss, similarity="qnorm"),
}
# the ring takes batches that differ in size
STARTS = {"ring": (0, 6, 10, 15, 16), True: (0, 4, 8, 12, 16)}
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


def wrapped(folder, case, gather, dtype, **options):
    """A loss around a model as the Trainer wraps it."""
    name, mini_batch_size, direction = case
    model = load_transformer(folder)
    loss = GATHERING_LOSSES[name](
        model,
        mini_batch_size=mini_batch_size,
        directions=direction,
        partition_mode="per_direction",
        gather_across_devices=gather,
        same_text="exclude",
        **options,
    )
    loss.to(dtype)
    loss.model = DistributedDataParallel(model, find_unused_parameters=mini_batch_size is None)
    return model, loss


def one_batch(folder, case, gather):
    """Loss and gradient of one batch, and the gradient accumulated over two."""
    model, loss = wrapped(folder, case, gather, torch.float64)
    rows = ROWS[STARTS[gather][dist.get_rank()] : STARTS[gather][dist.get_rank() + 1]]
    found = []
    for micro_batches in (1, 2):
        model.zero_grad()
        for synchronised in [False, True][-micro_batches:]:
            with nullcontext() if synchronised else loss.model.no_sync():
                value = loss(features(model, rows))
                value.backward()
        found.append(gradients(model))
    return value.item(), *found


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, folder):
    """The results of each rank for each case and way."""
    keys = list(itertools.product(CASES, STARTS))
    return on_ranks(request.param, lambda: {key: one_batch(folder, *key) for key in keys})


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gather", STARTS)
def test_ranks_are_one_process_on_the_joined_batch(model, ranks, case, gather):
    name, _, direction = case
    exponents = (1, 0)
    if name == "learnable":
        model.append(ExponentNorm(0.5, 0.5, learnable=True).double())
        exponents = model[-1].similarity.gamma_query, model[-1].similarity.gamma_document
    model.double()
    values, of_once, accumulated = zip(*(rank[case, gather] for rank in ranks), strict=True)
    embeddings = raw_embeddings(model, features(model, ROWS[: STARTS[gather][len(ranks)]]))
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


def ring_and_gathering(folder):
    """The gradients of both, in float32 and under autocast."""
    rank, found = dist.get_rank(), []
    for bf16, gather in itertools.product((False, True), ("ring", True)):
        case = ("learnable", None, ("query_to_doc", "doc_to_query"))
        _, loss = wrapped(folder, case, gather, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss(features(loss.model.module, ROWS[4 * rank : 4 * rank + 4])).backward()
        found.append(torch.cat([p.grad.flatten() for p in loss.parameters()]))
    return found


def refusals(folder):
    """The errors of batches that do not fit, with both ways to the negatives of other ranks."""
    rank, messages = dist.get_rank(), []
    for gather, columns, num_rows in (
        ("ring", 3 - rank, 4),
        (True, 3, 4 - rank),
        ("ring", 2 - rank, 4),
    ):
        model, loss = wrapped(
            folder, ("qnorm", None, ("query_to_doc", "doc_to_query")), gather, torch.float32
        )
        with pytest.raises((ValueError, RuntimeError)) as caught:
            loss(features(model, ROWS[:num_rows])[:columns])
        messages.append(str(caught.value))
    return messages


def test_float32_and_refusals(folder):
    (plain, *errors), (_, *other_errors) = on_ranks(
        2, lambda: (ring_and_gathering(folder), *refusals(folder))
    )
    # Under autocast, gathering adds the gradients of the ranks in bfloat16 and the ring in float32.
    for (ring, gathered), tolerance in ((plain[:2], 1e-5), (plain[2:], 5e-3)):
        assert (ring - gathered).norm() < tolerance * gathered.norm()
    assert errors[:2] == other_errors[:2]
    assert "the batch of rank 0 has 3 columns and the batch of rank 1 has 2" in errors[0]
    assert (
        "the batch of rank 0 has 4 rows and the batch of rank 1 has 3. Set"
        " dataloader_drop_last=True" in errors[1]
    )
    assert "rank 1 was refused" in errors[2]
    assert "needs at least two text columns" in other_errors[2]


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
OF_TEXTS = [
    (gather, options, *way)
    for gather, options, way in itertools.product(("ring", True), RULES, WAYS)
]
JOINT = {"same_text": "once", "partition_mode": "joint"}
OF_TEXTS.append((True, JOINT, None, ("query_to_doc", "query_to_query", "doc_to_doc")))
OF_TEXTS += [(True, {"labels": kind}, *way) for kind, way in itertools.product(LABELS, WAYS)]


def numbers():
    """Of blocks of two and three keys on two ranks, among them that of an empty text, 0."""
    keys = torch.tensor([[0, 7], [0, 0, 3]][dist.get_rank()])
    return Gathered(torch.zeros(len(keys), 1), "ring").numbers(keys)


def test_a_ring_counts_the_texts_of_blocks_of_any_size():
    first, second = on_ranks(2, numbers)
    torch.testing.assert_close(first, torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(second, torch.tensor([3.0, 3.0, 1.0]))


def of_texts(folder, case, part):
    """Value and gradients for some of the rows, by a model in DDP if there are processes."""
    gather, options, mini_batch_size, direction = case
    model, options = load_transformer(folder).double(), dict(options)
    labels = None
    if "labels" in options:
        labels = LABELS[options["labels"]][part]
        if options["labels"] not in ("weights", "classes"):
            options |= {"labels": "teacher", "teacher_weight": 0.7}
    if "prior" in options:
        options["prior"] = stm.DocumentPrior.from_texts(model, *options["prior"])
    options = {"partition_mode": "per_direction"} | options
    options |= {"directions": direction, "mini_batch_size": mini_batch_size}
    loss = stm.QNormRankingLoss(
        model, scale=3.0, **options, gather_across_devices=dist.is_initialized() and gather
    )
    if dist.is_initialized():
        loss.model = DistributedDataParallel(model)
    value = loss(features(model, SHARED[part]), labels)
    value.backward()
    return value.item(), gradients(model)


def parts_of_texts(folder):
    cuts = [5 if case[0] == "ring" else 4 for case in OF_TEXTS]
    parts = [slice(cut, None) if dist.get_rank() else slice(cut) for cut in cuts]
    return [of_texts(folder, case, part) for case, part in zip(OF_TEXTS, parts, strict=True)]


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


def test_one_process_needs_no_ring(model):
    values = [
        stm.QNormRankingLoss(model, gather_across_devices=gather)(features(model, ROWS[:4])).item()
        for gather in (False, "ring")
    ]
    assert values[0] == values[1]
    with pytest.raises(ValueError, match="gather_across_devices must be one of"):
        stm.QNormRankingLoss(model, gather_across_devices="all")
