"""same_text and margin: score matrices in float64, and sentence-transformers."""

import itertools
import random

import pytest
import torch
from _lookup import bag, tokenizer_of
from _losses import BATCHING, DIRECTIONS, TWICE, assert_same, batch_of, reference
from _tiny import ROWS, raw_embeddings
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers.processors import TemplateProcessing

import st_magnitude as stm
from st_magnitude import Term
from st_magnitude.kernel.batch import Above, Batch
from st_magnitude.losses.keys import Texts, text_keys
from st_magnitude.losses.ranks import Gathered

pytestmark = pytest.mark.usefixtures("in_float64")


def equal_texts(rows):
    """(B, M): documents with the text of the positive, the query, or another of its positives."""
    queries, positives, *negatives = zip(*rows, strict=True)
    documents = [*positives, *itertools.chain(*negatives)]
    pairs = list(zip(queries, positives, strict=True))
    same = torch.tensor([[document in pair for document in documents] for pair in pairs])
    same[:, : len(rows)] |= torch.tensor(
        [[other == query for other in queries] for query in queries]
    )
    return same


def too_close(scores, positive, margin, strategy):
    return scores > positive[:, None] - margin * (
        positive.abs()[:, None] if strategy == "relative" else 1.0
    )


def padded(rows, side="right", extra=0):
    width = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, where], mask[i, where] = torch.tensor(row, dtype=torch.long), 1
    return {"input_ids": ids, "attention_mask": mask}


def test_keys_are_those_of_the_tokens():
    generator = random.Random(0)
    rows = [[generator.randrange(4) for _ in range(generator.randrange(1, 9))] for _ in range(5000)]
    rows += [[0], [0, 0], [generator.randrange(250_000) for _ in range(512)]]
    keys = text_keys(padded(rows), 0)
    assert keys.dtype == torch.int64
    assert len(set(keys.tolist())) == len(set(map(tuple, rows)))
    assert len(set(zip(keys.tolist(), map(tuple, rows), strict=True))) == len(set(map(tuple, rows)))
    ids = torch.tensor([token for row in rows for token in row])
    starts = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    for other in (
        padded(rows, "left", extra=3),
        {"input_ids": ids, "offsets": starts[:-1]},
        {"input_ids": ids[None], "cu_seq_lens_q": starts.int()},
    ):
        assert torch.equal(text_keys(other, 1), keys)


def test_what_is_not_text_equals_nothing(monkeypatch):
    same = padded([[1, 2], [1, 2]])
    inputs = [
        bag(["tea"]).preprocess(["tea", "tea"]),
        {"input_ids": same["input_ids"]},
        same | {"pixel_values": torch.zeros(2, 3)},
        same | {"modality": ("image", "text")},
    ]
    keys = [text_keys(x, column).tolist() for column, x in enumerate(inputs)]
    monkeypatch.setattr("st_magnitude.losses.keys.get_rank", lambda: 1)
    keys += [text_keys(x, column).tolist() for column, x in enumerate(inputs)]
    assert len({key for column in keys for key in column}) == 16


@BATCHING
def test_keep_is_sentence_transformers(model, mini_batch_size):
    columns = batch_of(model, TWICE)
    loss = stm.CosineRankingLoss(model, same_text="keep", mini_batch_size=mini_batch_size)
    assert_same(model, loss(columns), MultipleNegativesRankingLoss(model)(columns, None))
    assert stm.CosineRankingLoss(model)(columns) < loss(columns)


@pytest.mark.parametrize("prompts", [("what ", None), ("what ", "notes see "), (None, "notes ")])
def test_a_document_that_is_the_query_is_known_by_its_text(model, prompts):
    """Whichever column has a prompt, behind the special token with which every text begins."""
    special = [
        (token, model.tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")
    ]
    template = TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    model.tokenizer.backend_tokenizer.post_processor = template
    queries, *documents = zip(*TWICE, strict=True)
    columns = [dict(model.preprocess(list(queries), prompt=prompts[0]))]
    columns += [dict(model.preprocess(list(x), prompt=prompts[1])) for x in documents]
    loss = stm.CosineRankingLoss(model, scale=3.0, same_text="exclude")
    embeddings = raw_embeddings(model, columns)
    expected = reference(embeddings, stm.COSINE, loss.terms, excluded=equal_texts(TWICE))
    torch.testing.assert_close(loss(columns), expected)


@pytest.mark.parametrize("margin", [None, -0.1])
@BATCHING
def test_the_share_that_is_left_out(model, caplog, mini_batch_size, margin):
    options = {"same_text": "exclude", "mini_batch_size": mini_batch_size}
    loss = stm.CosineRankingLoss(model, margin=margin, **options)
    absent = equal_texts(TWICE)
    if margin:
        queries, *documents = raw_embeddings(model, batch_of(model, TWICE))
        scores = stm.COSINE(queries, torch.cat(documents))
        absent |= too_close(scores, scores.diagonal(), margin, "absolute")
        assert absent.float().mean() > 1.2 * equal_texts(TWICE).float().mean()
    absent = absent.double()
    for rows in (TWICE, [row[:2] for row in TWICE]):  # a line of the log has that of one batch
        loss(batch_of(model, rows))
    number, num_documents = absent.shape
    assert loss.get_log()["excluded_negatives"] == pytest.approx(
        (absent.sum() - number).item() / number / (num_documents - 1)
    )
    with torch.no_grad():
        loss(batch_of(model, TWICE))
    assert loss.get_log() == {}
    assert margin or not caplog.records


@pytest.mark.parametrize("offset", [0, 3])
def test_a_large_batch_counts_its_first_rows(model, monkeypatch, offset):
    queries, documents = (torch.randn(n, 4) for n in (5, 9))
    exclude = [torch.arange(9) // 2, Above(lambda x: x)]
    batch = Batch(queries, documents, offset, exclude=exclude)
    scores = stm.COSINE(queries[:, :2], documents[:, :2])
    expected = scores > scores.diagonal(offset)[:, None]
    expected |= (torch.arange(9) // 2) == (torch.arange(offset, offset + 5) // 2)[:, None]
    expected.diagonal(offset).zero_()
    rule, ranks = stm.CosineRankingLoss(model).false_negatives, Gathered([queries, documents])
    for number in (5, 2):
        monkeypatch.setattr("st_magnitude.losses.negatives.PLAIN_SCORES", 9 * number)
        found = rule._left_out(batch, Texts(), ranks, stm.COSINE, 2)
        assert torch.equal(found, expected[:number].sum(dim=1))


@pytest.mark.parametrize(("margin", "warns"), [(0.9, True), (-0.2, False)])
def test_a_margin_that_leaves_out_most_warns(caplog, model, margin, warns):
    loss = stm.CosineRankingLoss(model, margin=margin, margin_strategy="relative")
    loss(batch_of(model, ROWS))
    share = loss.get_log()["excluded_negatives"]
    assert (f"; {100 * share:.0f} % of the documents are no negatives" in caplog.text) is warns


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([("a tea", "tea"), ("rain", "tea"), ("sky", "tea")], 3),  # one answer
        ([("a tea", "tea"), ("rain", "rain"), ("a tea", "sky")], 0),
        ([("a tea", "tea"), ("a tea", "sky")], 2),
        ([("a tea", "tea")], 1),
        ([("a tea", "tea", "sky"), ("rain", "tea", "tea")], 0),
    ],
)
def test_a_first_batch_without_negatives_warns_once(model, caplog, rows, number):
    loss = stm.CosineRankingLoss(model, same_text="exclude")
    values = [loss(batch_of(model, rows)) for _ in range(2)]
    assert (values[0] == 0) == (number == len(rows))
    assert caplog.text.count(
        f"{number} of {len(rows)} queries of the first batch have no negative"
    ) == bool(number)
    assert len(caplog.records) == bool(number)


@pytest.mark.parametrize(
    ("margin", "strategy", "direction"),
    [
        (-0.2, "absolute", DIRECTIONS[2]),
        (0.3, "absolute", DIRECTIONS[0]),
        (0.05, "relative", DIRECTIONS[1]),
        (0.05, "relative", DIRECTIONS[2]),
    ],
)
@BATCHING
def test_margin_by_the_models_own_scores(model, margin, strategy, direction, mini_batch_size):
    """Over the longest prefix, for all terms, with the norms that the similarity keeps."""
    rows = [row[:3] for row in ROWS]
    options = {"margin": margin, "margin_strategy": strategy, "mini_batch_size": mini_batch_size}
    options |= {"scale": 3.0, "directions": direction, "partition_mode": "per_direction"}
    options["same_text"] = "exclude"
    loss = stm.QNormRankingLoss(model, terms=[Term(8, 0.1), Term(24, 0.05)], **options)
    columns = batch_of(model, rows)
    embeddings = raw_embeddings(model, columns)
    queries, *documents = (x[:, :24].detach() for x in embeddings)
    scores = stm.QNORM(queries, torch.cat(documents))
    sides = {"excluded": scores, "excluded_queries": scores[:, : len(rows)].T}
    masks = {key: too_close(x, x.diagonal(), margin, strategy) for key, x in sides.items()}
    assert 0.05 < masks["excluded"].float().mean() < 0.95
    expected = reference(embeddings, stm.QNORM, loss.terms, direction, **masks)
    assert_same(model, loss(columns), expected)
    torch.testing.assert_close(
        loss.compute_loss_from_embeddings(embeddings), expected, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("plain_scores", [2**15, 0], ids=["plain", "tiled"])
@BATCHING
def test_explicit_negatives_of_a_row_can_stay(model, monkeypatch, plain_scores, mini_batch_size):
    """For the query of the row, whatever they score; other queries leave them out."""
    monkeypatch.setattr("st_magnitude.kernel.infonce.PLAIN_SCORES", plain_scores)
    options = {"scale": 3.0, "margin": 0.3, "mini_batch_size": mini_batch_size}
    options["same_text"] = "exclude"
    loss = stm.CosineRankingLoss(model, keep_explicit_negatives=True, **options)
    columns = batch_of(model, ROWS[:5])  # with two negatives each
    embeddings = raw_embeddings(model, columns)
    scores = stm.COSINE(embeddings[0], torch.cat(embeddings[1:]))
    excluded = too_close(scores, scores.diagonal(), 0.3, "absolute")
    excluded |= equal_texts(ROWS[:5])
    before = excluded.sum()
    for row in range(5):
        for place in (5 + row, 10 + row):
            excluded[row, place] = False
    assert 5 < excluded.sum() < before
    expected = reference(embeddings, stm.COSINE, loss.terms, excluded=excluded)
    assert_same(model, loss(columns), expected)
    share = (excluded.sum() - 5).item() / (5 * 14)
    assert loss.get_log()["excluded_negatives"] == pytest.approx(share)


def test_a_relative_margin_of_negative_scores(model):
    """The unit is the absolute score of the positive."""
    embeddings = [torch.randn(6, 8) for _ in range(3)]
    scores = stm.DOT(embeddings[0], torch.cat(embeddings[1:]))
    assert 0 < (scores.diagonal() < 0).sum() < 6
    loss = stm.DotRankingLoss(model, scale=3.0, margin=-0.5, margin_strategy="relative")
    excluded = too_close(scores, scores.diagonal(), -0.5, "relative")
    expected = reference(embeddings, stm.DOT, loss.terms, excluded=excluded)
    torch.testing.assert_close(loss.compute_loss_from_embeddings(embeddings), expected)


@pytest.mark.parametrize(("margin", "warns"), [(0.0, True), (-0.1, False)])
def test_a_margin_that_spares_nothing_to_learn_warns(model, caplog, margin, warns):
    stm.CosineRankingLoss(model, margin=margin)
    assert bool(caplog.records) is warns


def table_that_reads(words):
    return [StaticEmbedding(tokenizer_of(words), embedding_dim=32)]


@pytest.mark.parametrize(("query", "document"), ["aa", "ab", "at", "ta"])
def test_equal_ids_of_other_vocabularies_are_other_texts(model, query, document):
    """Routes with two tables a and b, or a transformer t, whose side has a prompt."""
    words = sorted({word for row in TWICE for text in row for word in text.split()})
    text = TWICE[0][0]
    mirrored = " ".join(words[-1 - words.index(word)] for word in text.split())
    rows = [*TWICE, (text, mirrored, "see below")]  # the ids of both are equal in a and b
    readers = {"a": table_that_reads(words), "b": table_that_reads(words[::-1]), "t": [*model]}
    again = table_that_reads(words) if query == document else readers[document]
    router = Router({"query": readers[query], "document": again}, default_route="document")
    routes = SentenceTransformer(modules=[router], device="cpu")
    columns = []
    for column, task in enumerate(["query", "document", "document"]):
        prompt = "what " if (query, document)[task == "document"] == "t" else None
        texts = [row[column] for row in rows]
        columns.append(dict(routes.preprocess(texts, task=task, prompt=prompt)) | {"task": task})
    loss = stm.CosineRankingLoss(routes)
    texts = loss.read(columns)
    for i, j in itertools.product(range(3), repeat=2):
        found = texts.bare[i][:, None] == texts.bare[j]
        same = torch.tensor([[one[i] == other[j] for other in rows] for one in rows])
        can_tell = query == document or (i == 0) == (j == 0)
        assert torch.equal(found, same if can_tell else torch.zeros_like(same))
    assert loss(columns).isfinite()
    counts = {row[1]: 1 + i for i, row in enumerate(rows)}
    prior = stm.DocumentPrior.from_texts(routes, counts, task="document", prompt=prompt)
    found = prior.fields(texts, Gathered([torch.eye(len(rows))] * 3))["log_q"]
    assert len(set(found[: len(rows)].tolist())) == len(counts)
    torch.testing.assert_close(found, torch.cat(prior.log_q(columns[1:])))
