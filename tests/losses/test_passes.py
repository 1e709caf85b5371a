"""No step has more tokens than sentence-transformers' passes, and none costs more."""

import itertools

import numpy as np
import pytest
import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import nn

from st_magnitude._upstream import minibatch_of
from st_magnitude.losses import groups, probe

OVERHEADS = [1, 10, 100, 1000, 100_000]


class Encoder(nn.Module):
    """Embeds a text as the sums of its tokens, and counts its passes and their tokens."""

    def __init__(self, overhead):
        super().__init__()
        self.overhead = overhead
        self.tokens = self.passes = 0
        traits = probe.traits_of(self)
        traits.reads_padding = False
        traits.overhead = lambda _: overhead

    def forward(self, features):
        ids, mask = features["input_ids"], features["attention_mask"]
        self.passes += 1
        self.tokens += ids.numel()
        sums = (ids * mask).sum(dim=1) + len(features.get("task", ""))
        return {"sentence_embedding": sums[:, None].double()}

    def cost(self):
        return self.tokens + self.overhead * self.passes


def column(rng, size):
    """Texts of random lengths, padded to the longest or beyond, with copies."""
    lengths = rng.integers(1, rng.choice([3, 20, 200]), size=size)
    width = max(lengths) + rng.choice([0, 0, 10])
    mask = np.arange(width) < lengths[:, None]
    ids = rng.integers(1, 1000, size=(size, width)) * mask
    copied = rng.integers(0, rng.integers(1, size + 1), size=size)
    features = {"input_ids": ids[copied], "attention_mask": mask[copied].astype(np.int64)}
    return {name: torch.from_numpy(x) for name, x in features.items()}


def vary(rng, columns):
    """Other kinds of columns than the first ones."""
    features = columns[rng.integers(len(columns))]
    size, width = features["input_ids"].shape
    kinds = [
        {"task": "query"},
        {"prompt_length": 1},
        {"token_type_ids": torch.zeros(size, width, dtype=torch.long)},
        {"attention_mask": features["attention_mask"] / 2},
        {"attention_mask": features["attention_mask"].flip(1)},
        {"note": ["one"] * size},
        {"note": torch.zeros(size, 2)},
    ]
    features |= kinds[rng.integers(len(kinds))]


@pytest.mark.parametrize("overhead", OVERHEADS)
def test_no_step_has_more_tokens_than_upstreams_columns(overhead, monkeypatch):
    rng = np.random.default_rng(overhead)
    for _ in range(100):
        size, number = rng.integers(1, 30), rng.integers(2, 6)
        columns = [column(rng, size) for _ in range(number)]
        is_varied = rng.random() < 0.4
        for _ in range(rng.integers(1, 4) * is_varied):
            vary(rng, columns)
        upstream, grouped, on_ranks = (Encoder(overhead) for _ in range(3))
        expected = embed_columns(upstream, [dict(x) for x in columns])
        found, _ = groups.embed_in_groups(grouped, columns, grouped)
        assert torch.equal(torch.cat(found), torch.cat(expected))
        assert grouped.tokens <= upstream.tokens
        assert is_varied or grouped.cost() <= upstream.cost()

        texts = size * (number if not is_varied else 1)
        of_another_rank = int(rng.integers(1, texts + 1))
        with monkeypatch.context() as patch:
            patch.setattr(
                groups, "largest_of_ranks", lambda _, own, other=of_another_rank: max(own, other)
            )
            found, _ = groups.embed_in_groups(on_ranks, columns, on_ranks)
        assert torch.equal(torch.cat(found), torch.cat(expected))
        assert on_ranks.tokens <= upstream.tokens
        assert is_varied or on_ranks.passes == max(grouped.passes, of_another_rank)


def test_no_mini_batches_have_more_tokens_than_upstreams():
    rng = np.random.default_rng(0)
    encoder = Encoder(1)

    def tokens(x, size):
        starts = range(0, len(x["input_ids"]), size)
        return sum(minibatch_of(x, i, i + size)["input_ids"].numel() for i in starts)

    gains = 0
    for _ in range(300):
        size = int(rng.integers(1, 10))
        columns = [column(rng, rng.integers(1, 30)) for _ in range(rng.integers(2, 6))]
        by_length = columns[0]["attention_mask"].sum(dim=1).argsort()
        columns[0] = {name: x[by_length] for name, x in columns[0].items()}
        ours, order = groups.sorted_by_length(columns, encoder, size)
        for mine, theirs in zip(ours, columns, strict=True):
            assert tokens(mine, size) <= tokens(theirs, size)
            gains += tokens(mine, size) < tokens(theirs, size)
        joined = torch.cat([encoder(x)["sentence_embedding"] for x in ours])
        for features, rows in zip(columns, order, strict=True):
            assert torch.equal(joined[rows], encoder(features)["sentence_embedding"])
    assert gains > 200


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [9, 4], [30, 29, 8, 8, 3, 3, 2, 1]])
@pytest.mark.parametrize("overhead", [0, 1, 5, 20, 1000])
@pytest.mark.parametrize("parts", [[1], [1, 2], [3]])
def test_the_cuts_are_the_cheapest(lengths, overhead, parts):
    """Among those with no more tokens than texts in an order and passes that upstream may have."""

    def tokens(ends):
        return sum(
            max(lengths[begin:end]) * (end - begin) for begin, end in itertools.pairwise(ends)
        )

    whole = len(lengths)
    every = [
        [0, *ends, whole]
        for number in range(whole)
        for ends in itertools.combinations(range(1, whole), number)
    ]
    most = tokens(sorted({0, whole, *(x for x in parts if x < whole)}))
    found = [0, *groups.cuts(np.array(lengths), overhead, most)]
    costs = [tokens(ends) + overhead * len(ends) for ends in every if tokens(ends) <= most]
    assert tokens(found) <= most
    assert tokens(found) + overhead * len(found) == min(costs)


def test_the_overhead_follows_the_device_and_the_model():
    def overhead(is_cpu, num_layers, hidden, vocabulary=30_522, share_trained=1.0):
        weights = num_layers * 12 * hidden**2
        trained = share_trained * (weights + vocabulary * hidden)
        return probe.Traits(num_layers * 8, weights, trained, False).overhead(is_cpu)

    minilm, base, large = (6, 384), (12, 768), (32, 4096)
    assert overhead(True, *minilm) == pytest.approx(100, rel=0.1)
    assert overhead(True, *base) == pytest.approx(60, rel=0.1)
    assert overhead(False, *minilm) == pytest.approx(3800, rel=0.1)
    assert overhead(False, *base) == pytest.approx(1000, rel=0.1)
    assert overhead(False, *large, share_trained=0.01) == pytest.approx(33, rel=0.1)
