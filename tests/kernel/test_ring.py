"""The ring against the joined batch in one process, on gloo processes."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _memory import peak_bytes
from _ranks import needs_fork, on_ranks

from st_magnitude import Similarity, Term, infonce
from st_magnitude._distributed import agree
from st_magnitude.kernel.batch import Above, Ids

pytestmark = needs_fork

ring = partial(infonce, backend="ring")
ROWS = (5, 1, 4, 6)  # of each rank; the second has a positive and, in some cases, no negative
DIM = 8
MANY = (Term(2, 0.3), Term(2, 0.7, 0.5), Term(5, 0.5, 2.0), Term(None, 0.4), Term(8, 1.3, 0.25))
ONE = (Term(None, 0.5),)
FORWARD, BACKWARD, BOTH = ("query_to_doc",), ("doc_to_query",), ("query_to_doc", "doc_to_query")
# (terms, exponents, directions, documents of a query)
CASES = {
    "cosine": (ONE, (1, 1), FORWARD, 1),
    "dot": (ONE, (0, 0), FORWARD, 2),
    "prefix": ((Term(4, 0.5),), (1, 0), BACKWARD, 1),
    "many": (MANY, (0.3, 0.8), BOTH, 2),
    "many dot": (MANY, (0, 0), BOTH, 2),
    "many qnorm": (MANY, (1, 0), BOTH, 1),
    "many dnorm": (MANY, (0, 1), BACKWARD, 1),
    "one": (ONE, (0.3, 0.8), BOTH, 2),
    "weights": (MANY, (0.3, 0.8), BOTH, 3),
    "hardness": (MANY, (0.3, 0.8), FORWARD, 2),
}
FREQUENCIES = ("log_q", "log_q_queries")
LOG_Q = {"cosine", "many", "many dot", "one"}  # cases with frequencies of documents and of queries
POSITIVES = {"dot", "many", "one"}  # cases with several positives
EXCLUDED = {
    "cosine": "ids",
    "many": "ids",
    "many dot": "margin",
    "prefix": "margin",
    "one": "ids and margin",
    "weights": "ids",
    "hardness": "margin but for spares",
}


def weights_of(case: str, num_queries: int) -> torch.Tensor | None:
    """Those of the rows of all ranks, rank after rank."""
    return 1 + torch.arange(num_queries).double() if case == "weights" else None


def threshold(positives: torch.Tensor) -> torch.Tensor:
    return positives - 0.3


def about(pairs: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
    """Ids, labels and priors of the texts of each rank; ids and labels occur on several ranks."""
    ids, labels = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    found = []
    for rank, (queries, documents) in enumerate(pairs):
        number = len(documents)
        log_q, log_q_queries = (
            (10 * rank + torch.arange(len(x))).double().cos() * 3 for x in (documents, queries)
        )
        found.append(
            {
                "ids": torch.randint(0, 12, (number,), generator=ids),
                "other ids": 100 * rank + torch.arange(number) // 2,
                "spares": (
                    10 * rank + torch.arange(len(queries)),
                    10 * rank + torch.arange(number) % len(queries),
                ),
                "labels": torch.randint(-5, 4, (number,), generator=labels),
                "log_q": log_q,
                "log_q_queries": log_q_queries,
            }
        )
    return found


def batches(num_ranks: int, documents: int) -> list[list[torch.Tensor]]:
    """Queries and documents of each rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(n * c, DIM, generator=generator, dtype=torch.float64).requires_grad_()
            for c in (1, documents)
        ]
        for n in ROWS[:num_ranks]
    ]


def learned(case: str) -> tuple[list[torch.Tensor], tuple[Term, ...], Similarity]:
    """Temperatures and exponents that are learned, and what they belong to."""
    terms, exponents, *_ = CASES[case]
    values = [float(x) for x in (*(t.temperature for t in terms), *exponents)]
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values]
    terms = tuple(Term(t.dim, tau, t.weight) for t, tau in zip(terms, leaves, strict=False))
    return leaves, terms, Similarity(*leaves[-2:]) if 0.3 in exponents else Similarity(*exponents)


def in_the_ring(num_ranks: int) -> dict[str, list[torch.Tensor]]:
    """For each case the loss and the gradients as DDP leaves them."""
    results = {}
    for case, (_, _, directions, documents) in CASES.items():
        leaves, terms, similarity = learned(case)
        pairs, rule = batches(num_ranks, documents), EXCLUDED.get(case, "")
        pair, known = pairs[dist.get_rank()], about(pairs)[dist.get_rank()]
        exclude = [known["ids"], known["other ids"]] if "ids" in rule else []
        if "margin" in rule:
            spares = Ids(*known["spares"]) if "spares" in rule else None
            exclude.append(Above(threshold, spares=spares))
        sizes = [[len(x) for x in pair] for pair in pairs]
        start = sum(n for n, _ in sizes[: dist.get_rank()])
        weights = weights_of(case, sum(n for n, _ in sizes))
        loss = ring(
            *pair,
            terms,
            similarity,
            directions,
            partition_mode="per_direction",
            exclude=exclude,
            positives=known["labels"] if case in POSITIVES else None,
            **({name: known[name] for name in FREQUENCIES} if case in LOG_Q else {}),
            weights=None if weights is None else weights[start : start + len(pair[0])],
            hardness_strength=0.7 * (case == "hardness"),
            tile_rows=2,
        )
        gradients = torch.autograd.grad(loss, [*pair, *leaves], allow_unused=True)
        shared = [
            torch.zeros_like(x) if g is None else g.clone()
            for x, g in zip(leaves, gradients[2:], strict=True)
        ]
        means = torch.stack([loss.detach(), *shared])
        dist.all_reduce(means)
        results[case] = [means / num_ranks, *(g / num_ranks for g in gradients[:2])]
    return results


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_the_joined_batch(num_ranks):
    """Learned temperatures and exponents among them, for batches that differ in size."""
    found = on_ranks(num_ranks, in_the_ring, num_ranks)
    for case, (_, _, directions, documents) in CASES.items():
        leaves, terms, similarity = learned(case)
        pairs, rule = batches(num_ranks, documents), EXCLUDED.get(case, "")
        sizes = [len(q) for q, _ in pairs]

        def joined(parts, sizes=sizes):  # column by column
            columns = range(len(parts[0]) // sizes[0])
            return torch.cat(
                [x[c * n : (c + 1) * n] for c in columns for x, n in zip(parts, sizes, strict=True)]
            )

        known = {name: [of_rank[name] for of_rank in about(pairs)] for name in about(pairs)[0]}
        spares = Ids(*(joined(side) for side in zip(*known["spares"], strict=True)))
        above = Above(threshold, spares=spares if "spares" in rule else None)
        ids = [joined(known[name]) for name in ("ids", "other ids") if "ids" in rule]
        options = {"partition_mode": "per_direction", "backend": "plain"}
        options |= {name: joined(known[name]) for name in FREQUENCIES if case in LOG_Q}
        options["positives"] = joined(known["labels"]) if case in POSITIVES else None
        options["weights"] = weights_of(case, sum(sizes))
        options["hardness_strength"] = 0.7 * (case == "hardness")
        arguments = (
            *(joined(side) for side in zip(*pairs, strict=True)),
            terms,
            similarity,
            directions,
        )
        exclude = [*ids, above] if "margin" in rule else ids
        loss = infonce(*arguments, exclude=exclude, **options)
        assert not rule or loss < 0.995 * infonce(*arguments, **options)
        inputs = [x for pair in pairs for x in pair]
        gradients = torch.autograd.grad(
            loss, [*leaves, *inputs], allow_unused=True, materialize_grads=True
        )
        means = torch.stack([loss.detach(), *gradients[: len(leaves)]])
        for rank, (found_means, *found_gradients) in enumerate(result[case] for result in found):
            torch.testing.assert_close(found_means, means, rtol=1e-9, atol=1e-12)
            wanted = gradients[len(leaves) + 2 * rank : len(leaves) + 2 * rank + 2]
            torch.testing.assert_close(found_gradients, list(wanted), rtol=1e-8, atol=1e-12)


def autocast_and_memory() -> dict[str, object]:
    """Float32 under autocast, no gradient, and the memory of large blocks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    pair = [torch.randn(256, 512, generator=generator).requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = ring(*(x.bfloat16() for x in pair))
        gathered = [torch.empty_like(pair[1]) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, pair[1].detach())
        plain = infonce(
            pair[0].bfloat16(), torch.cat(gathered).bfloat16(), offset=256 * dist.get_rank()
        )
    with torch.no_grad():
        assert not ring(*pair).requires_grad
    peak = peak_bytes(lambda: ring(*pair, tile_rows=8).backward())
    return {"losses": [loss, plain], "peak": peak / (4 * 256 * 512)}


def test_memory_does_not_grow_with_the_ranks():
    """In units of the documents of a rank; under autocast it agrees with gathering."""
    peaks = []
    for num_ranks in (2, 4):
        for result in on_ranks(num_ranks, autocast_and_memory):
            torch.testing.assert_close(*result["losses"], rtol=1e-6, atol=0)
            peaks.append(result["peak"])
    assert 6 < max(peaks) < 8.3
    assert max(peaks) - min(peaks) < 1.1, peaks


def joined_loss(parts: list[list[torch.Tensor]], **options: Any) -> list[torch.Tensor]:
    """Loss and gradients, by the plain formula in float64, of two ranks with one document a query;
    options with a row for each document, and queries and documents, are those of each rank."""
    leaves = [x.detach().double().requires_grad_() for part in parts for x in part]
    queries, documents = torch.cat(leaves[::2]), torch.cat(leaves[1::2])
    loss = infonce(queries, documents, backend="plain", **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


# name: (exponents, hardness, range of log q, whether all negatives of a rank are excluded)
STRETCHED = {
    "hardness": ((1, 0), 200.0, 0, False),
    "pairs are best": ((0, 0), 9.0, 0, False),
    "log q": ((1, 1), 0.0, 5000, False),
    "both": ((1, 0), 9.0, 300, False),
    "all excluded": ((1, 0), 9.0, 300, True),
    "nothing else": ((0, 0), 0.0, 0, True),
}


def stretched(case: str) -> tuple[list[list[torch.Tensor]], Similarity, list[dict[str, Any]]]:
    """Embeddings of two ranks, the similarity, and their options."""
    exponents, hardness, log_range, is_excluded = STRETCHED[case]
    pairs = [[x.detach().float() for x in part] for part in batches(2, 1)]
    if case in ("pairs are best", "nothing else"):
        pairs = [[5 * q, 5 * q] for q, _ in pairs]
    options: list[dict[str, Any]] = [{}, {}]
    for rank, (_, documents) in enumerate(pairs):
        log_q = -log_range * torch.linspace(rank, 1 - rank, len(documents))
        options[rank] = {"hardness_strength": hardness, "log_q": log_q}
        if is_excluded:
            options[rank]["exclude"] = torch.zeros(len(documents), dtype=torch.int64)
    return pairs, Similarity(*exponents), options


def stretched_in_the_ring() -> dict[str, list[torch.Tensor]]:
    found = {}
    for case in STRETCHED:
        pairs, similarity, options = stretched(case)
        pair = [x.requires_grad_() for x in pairs[dist.get_rank()]]
        loss = ring(*pair, [Term(temperature=0.1)], similarity, **options[dist.get_rank()])
        found[case] = [loss.detach(), *torch.autograd.grad(loss, pair)]
    return found


def test_the_largest_logit_is_the_anchor():
    """In float32, where a block of another rank has larger logits, or none that counts."""
    ranks = on_ranks(2, stretched_in_the_ring)
    for case in STRETCHED:
        pairs, similarity, options = stretched(case)
        tensors = {name for name, x in options[0].items() if torch.is_tensor(x)}
        both = {name: torch.cat([x[name] for x in options]) for name in tensors}
        loss, *gradients = joined_loss(
            pairs, terms=[Term(temperature=0.1)], similarity=similarity, **options[0] | both
        )
        mean = sum(of_rank[case][0] for of_rank in ranks) / 2
        torch.testing.assert_close(mean.double(), loss, rtol=1e-5, atol=1e-4, msg=case)
        found = [x / 2 for of_rank in ranks for x in of_rank[case][1:]]
        for a, b in zip(found, gradients, strict=True):
            atol = 1e-3 * (1 + b.abs().max())
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=atol, msg=case)


VIEWS = {
    "columns": lambda x: torch.cat([x, x], dim=1)[:, :DIM],
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "transposed": lambda x: x.T.contiguous().T,
    "as it is": lambda x: x,
}


def views() -> dict[str, list[torch.Tensor]]:
    """The loss of embeddings, ids and frequencies that are views, and of a short prefix."""
    found = {}
    pair, known = batches(2, 1)[dist.get_rank()], about(batches(2, 1))[dist.get_rank()]
    for similarity in (Similarity(0, 0), Similarity(1, 0.5)):
        for name, view in VIEWS.items():
            for dim in (5, None):
                vectors = [view(x.detach()).requires_grad_() for x in pair]
                ids, log_q = (known[x].repeat_interleave(2)[::2] for x in ("ids", "log_q"))
                options = {"exclude": ids, "log_q": log_q, "positives": known["labels"]}
                options |= {"directions": BOTH, "partition_mode": "per_direction"}
                terms = [Term(3, 0.5), Term(dim, 0.5)]
                loss = ring(*vectors, terms, similarity, **options)
                key = f"{similarity} {dim}", name
                found[key] = [loss.detach(), *torch.autograd.grad(loss, vectors)]
    return found


def test_what_is_sent_is_contiguous():
    for found in on_ranks(2, views):
        for (settings, name), values in found.items():
            torch.testing.assert_close(values, found[settings, "as it is"], msg=str(name))


def failures() -> dict[str, str]:
    """The errors where the batch of rank 1 does not fit, or is unlike those of other ranks."""
    is_odd = dist.get_rank() == 1
    queries, ids = torch.zeros(3, 4, requires_grad=True), torch.arange(3)
    odd = {
        "a document is missing": {"documents": torch.zeros(2, 4)},
        "dimensions": {"queries": torch.zeros(3, 5), "documents": torch.zeros(3, 5)},
        "bytes": {"queries": queries.double(), "documents": queries.double()},
        "precisions": {"documents": queries.double()},
        "terms": {"terms": [Term(), Term(2)]},
        "exclude": {"exclude": [ids, ids]},
        "spares": {"exclude": Above(threshold, spares=Ids(ids, ids))},
        "positives": {"positives": ids},
        "log_q": {"log_q": ids.float()},
        "log_q_queries": {"log_q_queries": ids.float()},
        "gradients": {"queries": queries.detach(), "documents": queries.detach()},
    }
    errors = {}
    for name, options in odd.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            ring(**{"queries": queries, "documents": queries} | (options if is_odd else {}))
        # the ranks are still in step
        assert agree(queries.device, lambda: [dist.get_rank()], 1) == [[0], [1], [2]]
        errors[name] = str(caught.value)
    return errors


def test_all_ranks_raise_together():
    first, second, third = on_ranks(3, failures)
    assert first == third
    of_one_rank = {"a document is missing": "3 queries with offset 0", "precisions": "float64"}
    for name, error in second.items():
        if name in of_one_rank:
            assert of_one_rank[name] in error
            error = "The batch of rank 1 was refused; read the error of that process."
        else:
            assert name in error
            assert "The ranks of a ring differ" in error
        assert first[name] == error
