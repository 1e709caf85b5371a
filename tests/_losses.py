"""Batches, gradients and the formula, for the tests of losses."""

import pytest
import torch
from _tiny import ROWS, formula

from st_magnitude._upstream import SINCE_6_2

BATCHING = pytest.mark.parametrize("mini_batch_size", [None, 3], ids=["plain", "cached"])
DIRECTIONS = [("query_to_doc",), ("doc_to_query",), ("query_to_doc", "doc_to_query")]

# A positive that two queries share (0, 3), a query with two positives (1, 4), a negative that is a
# positive (0, 2, 5), boilerplate that occurs twice, which all queries keep as a negative, and
# documents that are a query: of its own row (6), and of others as positive (5, 6) and negative (4).
TWICE = [
    (ROWS[0][0], ROWS[0][1], ROWS[0][1]),
    (ROWS[1][0], ROWS[1][1], "see below"),
    (ROWS[2][0], ROWS[2][1], ROWS[0][1]),
    (ROWS[3][0], ROWS[0][1], "see below"),
    (ROWS[1][0], ROWS[4][1], ROWS[2][0]),
    (ROWS[5][0], ROWS[6][0], ROWS[2][1]),
    (ROWS[6][0], ROWS[5][0], ROWS[6][0]),
]


def features(model, num_rows=8, num_negatives=0, start=0):
    """The batch of some rows, as the Trainer tokenises it."""
    return batch_of(model, [row[: 2 + num_negatives] for row in ROWS[start : start + num_rows]])


def batch_of(model, rows):
    return [dict(model.preprocess(list(column))) for column in zip(*rows, strict=True)]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def value_and_gradients(model, value):
    model.zero_grad()
    value.backward()
    found = gradients(model)
    model.zero_grad()
    return value.detach(), found


def assert_same_gradients(found, expected, factor=1.0, rtol=1e-8, atol=1e-12):
    if not SINCE_6_2:  # nor does such a release cache gradients in float64
        rtol, atol = max(rtol, 1e-4), max(atol, 1e-6)
    found = {name: gradient / factor for name, gradient in found.items()}
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def assert_same(model, found, expected, rtol=1e-8, atol=1e-12):
    """By value and gradients; exponents that embeddings do not reach have none in the reference."""
    (found, gradients), (expected, others) = (
        value_and_gradients(model, x) for x in (found, expected)
    )
    torch.testing.assert_close(found, expected, rtol=rtol / 10, atol=1e-12)
    assert expected > 0
    assert_same_gradients({name: gradients[name] for name in others}, others, 1.0, rtol, atol)


def reference(embeddings, similarity, terms, direction=("query_to_doc",), **options):
    """sum_t w_t formula at a scale of 3, which is for a temperature of 0.05."""
    exponents = similarity.gamma_query, similarity.gamma_document
    return sum(
        term.weight
        * formula(embeddings, exponents, 0.15 / term.temperature, direction, term.dim, **options)
        for term in terms
    )
