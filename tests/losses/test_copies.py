"""Copies of a text in a batch: loops over the distinct texts of each softmax, in float64."""

import itertools
import math

import pytest
import torch
from _losses import TWICE, assert_same, assert_same_gradients, batch_of, value_and_gradients
from _tiny import ROWS, raw_embeddings

import st_magnitude as stm
from st_magnitude import Term
from st_magnitude.losses.keys import Texts

pytestmark = pytest.mark.usefixtures("in_float64")

SAME_TEXT = ("once", "exclude", "keep")
SOFTMAXES = {  # the directions of each softmax
    "documents": [("query_to_doc",)],
    "queries": [("doc_to_query",)],
    "both": [("query_to_doc",), ("doc_to_query",)],
    "joint": [("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")],
}


def texts_of(rows):
    """Queries and documents of a batch, and the (query, document) to which each belongs."""
    queries, positives, *negatives = zip(*rows, strict=True)
    documents = [*positives, *itertools.chain(*negatives)]
    asked = [*queries, *[None] * (len(documents) - len(queries))]
    pairs = {"query": list(zip(queries, positives, strict=True))}
    pairs["doc"] = list(zip(asked, documents, strict=True))
    return {"query": list(queries), "doc": documents}, pairs


def counts(rows, i, j, source, target, same_text):
    """Whether column j counts for row i."""
    texts, pairs = texts_of(rows)
    if source == target and j % len(rows) == i:
        return False  # of its own pair
    if source != target and j == i:
        return True  # the answer
    if same_text == "keep":
        return True
    if texts[source][i] == texts[target][j]:
        return False  # a document that is the query, or a copy of the row among texts of its kind
    (query, positive), (other_query, other_document) = pairs["query"][i], pairs[target][j]
    is_shared = query == other_query or positive == other_document
    return not is_shared if same_text == "exclude" or source == target else True


def over_distinct_texts(rows, embeddings, loss, softmaxes, same_text, log_q=None):
    """The mean over softmaxes of sum_t w_t · mean_i -log(share of the answer / all shares).

    A text of which n columns count has n shares, or with "once" n of as many as it has copies.
    ``log_q`` of a document divides its shares.
    """
    texts, _ = texts_of(rows)
    vectors = {"query": embeddings[0], "doc": torch.cat(embeddings[1:])}
    total = 0.0
    for term, directions, i in itertools.product(loss.terms, softmaxes, range(len(rows))):
        shares, answer = [], None
        for direction in directions:
            source, target = direction.split("_to_")
            sides = {"query": loss.similarity.query, "doc": loss.similarity.document}
            for text in dict.fromkeys(texts[target]):
                copies = [j for j, other in enumerate(texts[target]) if other == text]
                counted = [j for j in copies if counts(rows, i, j, source, target, same_text)]
                row, column = vectors[source][i, : term.dim], vectors[target][copies[0], : term.dim]
                score = sides[source](row[None]) @ sides[target](column[None]).T
                share = (3.0 * 0.05 / term.temperature * score).exp().squeeze()
                share = share / (len(copies) if same_text == "once" and not log_q else 1)
                share = share / (math.exp(log_q[text]) if log_q and target == "doc" else 1)
                shares.append(len(counted) * share)
                if i in copies and answer is None:
                    answer = share
        total = total - term.weight * (answer / sum(shares)).log()
    return total / len(rows) / len(softmaxes)


def loss_of(model, softmaxes, **options):
    directions = tuple(itertools.chain(*softmaxes))
    mode = "joint" if len(softmaxes) == 1 else "per_direction"
    terms = [Term(8, 0.1), Term(None, 0.2, 0.5)]
    options |= {"scale": 3.0, "directions": directions, "partition_mode": mode}
    return stm.QNormRankingLoss(model, terms=terms, **options).double()


# Only a query is there twice
ASKED_TWICE = [(ROWS[max(i, 1)][0], ROWS[i][1]) for i in range(4)]


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, TWICE) for name in SOFTMAXES), ("joint", ASKED_TWICE)]
)
def test_each_choice_is_a_loop_over_distinct_texts(model, monkeypatch, name, rows):
    """With both engines, with and without cached gradients."""
    softmaxes = SOFTMAXES[name]
    columns = batch_of(model, rows)
    values = set()
    for same_text in SAME_TEXT:
        loss = loss_of(model, softmaxes, same_text=same_text)
        embeddings = raw_embeddings(model, columns)
        expected = over_distinct_texts(rows, embeddings, loss, softmaxes, same_text)
        expected, gradients = value_and_gradients(model, expected)
        values.add(round(expected.item(), 6))
        for plain_scores, size in itertools.product([2**15, 0], [None, 3]):
            monkeypatch.setattr("st_magnitude.kernel.infonce.PLAIN_SCORES", plain_scores)
            loss = loss_of(model, softmaxes, same_text=same_text, mini_batch_size=size)
            found, others = value_and_gradients(model, loss(columns))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            assert_same_gradients(others, gradients)
    assert len(values) == len(SAME_TEXT)


@pytest.mark.parametrize("same_text", SAME_TEXT)
def test_with_a_prior_each_copy_weighs_one_by_q(model, same_text):
    """ "once" then divides by no counts of the batch: the prior has those of all pairs."""
    prior = stm.DocumentPrior.from_texts(model, [row[1] for row in TWICE])
    loss = loss_of(model, SOFTMAXES["documents"], same_text=same_text, prior=prior)
    columns = batch_of(model, TWICE)
    texts, _ = texts_of(TWICE)
    log_q = torch.cat(prior.log_q(columns[1:])).tolist()
    log_q = dict(zip(texts["doc"], log_q, strict=True))
    embeddings = raw_embeddings(model, columns)
    softmaxes = SOFTMAXES["documents"]
    expected = over_distinct_texts(TWICE, embeddings, loss, softmaxes, same_text, log_q)
    assert_same(model, loss(columns), expected, rtol=1e-6)


@pytest.mark.parametrize("labels", ["classes", "weights"])
def test_gradients_with_labels_are_those_of_distinct_texts(model, labels):
    """Positives of a class keep their shares of the target; weights multiply rows."""
    values = torch.tensor([0, 1, 0, 0, 1, -1, 2])
    values = values if labels == "classes" else values + 1.5
    loss = stm.CosineRankingLoss(model, scale=3.0, same_text="once", labels=labels)
    columns = batch_of(model, TWICE)
    queries, *documents = raw_embeddings(model, columns)
    texts, _ = texts_of(TWICE)
    number = {text: k for k, text in enumerate(dict.fromkeys(texts["doc"]))}
    of_columns = torch.tensor([number[text] for text in texts["doc"]])
    first = [texts["doc"].index(text) for text in number]
    scores = 3.0 * stm.COSINE(queries, torch.cat(documents)[first])  # (B, distinct)
    itself = torch.tensor([[text == row[0] for text in number] for row in TWICE])
    log_shares = scores.masked_fill(itself, -1e4).log_softmax(dim=1)
    targets = torch.eye(len(TWICE))
    if labels == "classes":
        targets = ((values[:, None] == values) & (values >= 0) | targets.bool()).double()
    targets = targets / targets.sum(dim=1, keepdim=True)
    copies = torch.bincount(of_columns)[of_columns[: len(TWICE)]].log()  # of each positive
    rows = (targets * (copies - log_shares[:, of_columns[: len(TWICE)]])).sum(dim=1)
    weights = values if labels == "weights" else 1.0
    assert_same(model, loss(columns, values), (weights * rows).mean())


def test_what_each_choice_learns(model):
    """Of pairs drawn COUNTS[q][d] times, "once" is best at log p(d|q), and "keep" without log p(d);
    "exclude" at neither."""
    counts = torch.tensor([[6, 1, 2], [3, 3, 1]])
    drawn = counts.flatten().tolist()
    queries, documents = zip(
        *[(k // 3, k % 3) for k, n in enumerate(drawn) for _ in range(n)], strict=True
    )
    keys = [torch.tensor(queries), 100 + torch.tensor(documents)]
    log_p = (counts / counts.sum(dim=1, keepdim=True)).log()
    best = {"once": log_p, "keep": log_p - counts.sum(dim=0).log()}
    for same_text in SAME_TEXT:
        loss = stm.DotRankingLoss(model, scale=1.0, same_text=same_text)
        texts = Texts() if same_text == "keep" else Texts(keys=keys, bare=keys)
        for learned_by, logits in best.items():
            vectors = logits.T[list(documents)].clone().requires_grad_()  # (16, 2)
            rows = torch.eye(2)[list(queries)]
            loss.compute_loss_from_embeddings([rows, vectors], texts).backward()
            of_documents = torch.zeros(3, 2).index_add_(0, keys[1] - 100, vectors.grad)
            assert (of_documents.abs().max() < 1e-6) == (learned_by == same_text)


def test_copies_are_counted_in_the_log_and_the_warning(model, caplog):
    """A batch of one answer has nothing to learn, whichever way its copies weigh."""
    loss = stm.CosineRankingLoss(model, same_text="once")
    one_answer = [(row[0], "tea") for row in ROWS[:4]]
    loss(batch_of(model, one_answer)).backward()
    assert "4 of 4 queries of the first batch have no negative" in caplog.text
    assert loss.get_log()["excluded_negatives"] == 1
    assert all(p.grad.abs().max() < 1e-12 for p in model.parameters() if p.grad is not None)


def test_weights_of_negatives_leave_copies_of_the_positive_out(model):
    """Which "once" keeps; they would weigh as negatives."""
    chosen = [stm.CosineRankingLoss(model, hardness_strength=x) for x in (0.0, 5.0)]
    assert [loss.get_config_dict()["same_text"] for loss in chosen] == ["once", "exclude"]
