"""DocumentPrior: counts by tokens, the loss against the formula in float64, and a skewed task."""

import math

import pytest
import torch
from _lookup import bag
from _losses import BATCHING, assert_same, batch_of, reference
from _tiny import ROWS, raw_embeddings
from torch.nn.functional import cross_entropy

import st_magnitude as stm
from st_magnitude import DocumentPrior
from st_magnitude.losses import temp_agg_mrl

pytestmark = pytest.mark.usefixtures("in_float64")

# query, positive, negative; all positives differ
BATCH = [(*ROWS[i][:2], ROWS[i][2]) for i in (0, 1, 2, 3, 5, 7)]
POSITIVES = {BATCH[0][1]: 9, BATCH[1][1]: 4, BATCH[2][1]: 1, "lima": 30, "see below": 2}
NEGATIVES = {"see below": 50, "returns a number": 3}


def log_q(rows, negatives, smoothing=1.0):
    """Of the documents of a batch, one number at a time: (M,)."""
    others = POSITIVES if negatives is None else negatives
    tables = [POSITIVES] + [others] * (len(rows[0]) - 2)
    found = []
    for table, column in zip(tables, list(zip(*rows, strict=True))[1:], strict=True):
        total = sum(table.values()) + smoothing * len(table)
        found += [math.log((table.get(text, 0) + smoothing) / total) for text in column]
    return torch.tensor(found, dtype=torch.float64)


def test_counts_are_those_of_tokens(model):
    """Case and truncation make texts equal; the prompt is part of a text."""
    model.max_seq_length = 6
    texts = ["see below", "See Below", "see also tea", "a b c d e f g", "a b c d e f z"]
    prior = DocumentPrior.from_texts(model, texts, smoothing=0.5)
    asked = ["see below", "see also tea", "a b c d e f", "none", "a b c d e f z"]
    [found] = prior.log_q([model.preprocess(asked)])
    expected = [2.5, 1.5, 2.5, 0.5, 2.5]
    torch.testing.assert_close(found, torch.tensor(expected).div(5 + 0.5 * 3).log())
    prompted = DocumentPrior.from_texts(model, texts, prompt="notes: ")
    assert not torch.equal(
        *[prompted.log_q([model.preprocess(["see below"], prompt=p)])[0] for p in ("notes: ", None)]
    )
    found = prompted.get_config_dict()["prior"]
    assert found == {"texts": 3, "negatives": None, "smoothing": 1.0}


@pytest.mark.parametrize(
    ("positives", "options", "message"),
    [
        ([], {}, "There are no positives"),
        (["tea"], {"negatives": []}, "There are no negatives"),
        (["tea"], {"smoothing": 0}, "smoothing must be a positive number; got 0"),
        (
            {"tea": 1, "lima": -1},
            {},
            "Counts must be 0 or more; got -1 for 'lima' of the positives",
        ),
        ({"tea": 1}, {"negatives": {"a": math.nan}}, "got nan for 'a' of the negatives"),
    ],
)
def test_errors(model, positives, options, message):
    with pytest.raises(ValueError, match=message):
        DocumentPrior.from_texts(model, positives, **options)


def test_needs_tokens(model):
    with pytest.raises(ValueError, match="this model has none"):
        DocumentPrior.from_texts(bag(["tea"]), ["tea"])
    loss = stm.CosineRankingLoss(model, prior=DocumentPrior.from_texts(model, ["tea"]))
    with pytest.raises(ValueError, match="needs the texts of a batch"):
        loss.compute_loss_from_embeddings([torch.randn(3, 4)] * 2)


def test_a_prior_of_other_texts_warns(model, caplog):
    positives = [row[1] for row in BATCH]
    for texts, number in ((["tea"], 6), (positives[:3], 3), (positives, 0)):
        caplog.clear()
        loss = stm.CosineRankingLoss(model, prior=DocumentPrior.from_texts(model, texts))
        for _ in range(2):
            loss(batch_of(model, BATCH))
        assert caplog.text.count(f"does not contain {number} of the 6 positives") == bool(number)


@pytest.mark.parametrize(
    ("negatives", "mini_batch_size"), [(NEGATIVES, 3), (None, None)], ids=["own", "shared"]
)
def test_equals_the_formula(model, negatives, mini_batch_size):
    """With counts of negatives of their own, or those of positives."""
    prior = DocumentPrior.from_texts(model, POSITIVES, negatives)
    options = {"scale": 3.0, "mini_batch_size": mini_batch_size, "same_text": "keep"}
    options["terms"] = temp_agg_mrl([8, 32], [0.05, 0.2])
    loss = stm.LearnableNormLoss(model, prior=prior, **options).double()
    batch = batch_of(model, BATCH)
    by_hand = reference(
        raw_embeddings(model, batch), loss.similarity, loss.terms, log_q=log_q(BATCH, negatives)
    )
    uncorrected = stm.LearnableNormLoss(model, **options).double()([dict(x) for x in batch])
    assert abs(uncorrected.item() - by_hand.item()) > 1e-2
    assert_same(model, loss(batch), by_hand, rtol=1e-5, atol=1e-7)


@BATCHING
def test_queries_as_columns_were_drawn_once(model, mini_batch_size):
    prior = DocumentPrior.from_texts(model, POSITIVES, NEGATIVES)
    options = {"prior": prior, "mini_batch_size": mini_batch_size, "same_text": "keep"}
    loss = stm.CosineRankingLoss(model, directions=("query_to_doc", "query_to_query"), **options)
    batch = batch_of(model, BATCH)
    queries, *documents = raw_embeddings(model, batch)
    of_documents = 20 * stm.COSINE(queries, torch.cat(documents)) - log_q(BATCH, NEGATIVES)
    of_queries = 20 * stm.COSINE(queries, queries) + math.log(sum(POSITIVES.values()))
    of_queries = of_queries.masked_fill(torch.eye(len(BATCH), dtype=torch.bool), -torch.inf)
    expected = cross_entropy(torch.cat([of_documents, of_queries], dim=1), torch.arange(len(BATCH)))
    torch.testing.assert_close(loss(batch).detach(), expected.detach(), rtol=1e-6, atol=0)
