"""DocumentPrior: counts by tokens, the loss against the formula in float64, a skewed task, resume and two processes."""

import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from _helpers import assert_same_gradients, gradients, train
from _ranks import on_ranks
from _tiny import ROWS, load_transformer, raw_embeddings, tokenizer
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, StaticEmbedding
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude import DocumentPrior
from st_magnitude.losses import temp_agg_mrl

pytestmark = pytest.mark.usefixtures("one_thread")

BATCHING = pytest.mark.parametrize("mini_batch_size", [None, 3], ids=["plain", "cached"])
BATCH = [(*ROWS[i][:2], ROWS[i][2]) for i in (0, 1, 2, 3, 5, 7)]  # query, positive, negative; all positives differ
POSITIVES = {BATCH[0][1]: 9, BATCH[1][1]: 4, BATCH[2][1]: 1, "lima": 30, "see below": 2}
NEGATIVES = {"see below": 50, "returns a number": 3}


@pytest.fixture
def model(folder):
    """In float64, so that two ways to the same number can be told from two numbers."""
    return load_transformer(folder).double()


def features(model, rows):
    return [dict(model.preprocess(list(column))) for column in zip(*rows, strict=True)]


def log_q(rows, negatives, smoothing=1.0):
    """Of the documents of a batch, one number at a time: (M,)."""
    tables = [POSITIVES, *itertools.repeat(POSITIVES if negatives is None else negatives, len(rows[0]) - 2)]
    found = []
    for table, column in zip(tables, list(zip(*rows, strict=True))[1:], strict=True):
        total = sum(table.values()) + smoothing * len(table)
        found += [math.log((table.get(text, 0) + smoothing) / total) for text in column]
    return torch.tensor(found, dtype=torch.float64)


def reference(embeddings, similarity, terms, scale, corrections):
    """sum_t w_t cross_entropy(scores / tau_t - log q)."""
    queries, *documents = embeddings
    own = torch.arange(len(queries))
    return sum(
        term.weight
        * cross_entropy(
            scale * 0.05 / term.temperature * similarity(queries[:, : term.dim], torch.cat(documents)[:, : term.dim])
            - corrections,
            own,
        )
        for term in terms
    )


# --- the table --------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_tokens(model):
    """Case and truncation make texts equal; the prompt is part of a text."""
    model.max_seq_length = 6
    texts = ["see below", "See Below", "see also tea", "a b c d e f g", "a b c d e f z"]
    prior = DocumentPrior.from_texts(model, texts, smoothing=0.5)
    [found] = prior.log_q(
        features(model, [[t] for t in ["see below", "see also tea", "a b c d e f", "none", *texts[4:]]])
    )
    expected = [2.5, 1.5, 2.5, 0.5, 2.5]
    torch.testing.assert_close(found, torch.tensor(expected).div(5 + 0.5 * 3).log())
    prompted = DocumentPrior.from_texts(model, texts, prompt="notes: ")
    assert not torch.equal(*[prompted.log_q([model.preprocess(["see below"], prompt=p)])[0] for p in ("notes: ", None)])
    assert repr(prompted) == "DocumentPrior(3 texts, 5 occurrences)"


def test_texts_are_counts(model):
    texts = list(itertools.chain.from_iterable([text] * number for text, number in POSITIVES.items()))
    counted = DocumentPrior.from_texts(model, texts, ["see below"] * 4)
    given = DocumentPrior.from_counts(model, Counter(texts), {"see below": 4.0})
    for found in zip(*(prior.log_q(features(model, BATCH)[1:]) for prior in (counted, given)), strict=True):
        assert torch.equal(*found)
    assert repr(counted) == "DocumentPrior(5 texts, 46 occurrences; negatives: 1 texts, 4 occurrences)"


def test_negatives_without_counts_have_those_of_the_positives(model):
    prior = DocumentPrior.from_counts(model, POSITIVES)
    found = torch.cat(prior.log_q(features(model, BATCH)[1:]))
    torch.testing.assert_close(found.double(), log_q(BATCH, None), rtol=1e-6, atol=0)
    assert len(set(found.tolist())) > 3


@pytest.mark.parametrize(
    ("positives", "options", "message"),
    [
        ([], {}, "There are no positives"),
        (["tea"], {"negatives": []}, "There are no negatives"),
        (["tea"], {"smoothing": 0}, "smoothing must be a positive number; got 0"),
        ({"tea": 1, "lima": -1}, {}, "Counts must be 0 or more; got -1 for 'lima' of the positives"),
        ({"tea": 1}, {"negatives": {"a": math.nan}}, "got nan for 'a' of the negatives"),
    ],
)
def test_errors(model, positives, options, message):
    make = DocumentPrior.from_counts if isinstance(positives, dict) else DocumentPrior.from_texts
    with pytest.raises(ValueError, match=message):
        make(model, positives, **options)


def test_needs_tokens(model):
    bag = SentenceTransformer(modules=[BoW(["tea"])], device="cpu")
    with pytest.raises(ValueError, match="this model has none"):
        DocumentPrior.from_texts(bag, ["tea"])
    loss = stm.CosineRankingLoss(model, prior=DocumentPrior.from_texts(model, ["tea"]))
    with pytest.raises(ValueError, match="needs the texts of a batch"):
        loss.compute_loss_from_embeddings([torch.randn(3, 4)] * 2)


def test_a_prior_of_other_texts_warns(model, caplog):
    for texts, warns in ((["tea"], True), ([BATCH[3][1]], False)):
        caplog.clear()
        loss = stm.CosineRankingLoss(model, prior=DocumentPrior.from_texts(model, texts))
        for _ in range(2):
            loss(features(model, BATCH))
        assert caplog.text.count("contains none of the 6 positives") == warns


# --- the loss ---------------------------------------------------------------------------------------------------------

LOSSES = {
    "cosine": (stm.CosineRankingLoss, {}),
    "qnorm": (stm.QNormRankingLoss, {"terms": temp_agg_mrl([8, 32], [0.05, 0.2])}),
    "learnable": (stm.LearnableNormLoss, {"temperature": "learned"}),
    "tempagg": (stm.TempAggMRLLoss, {"similarity": "dot"}),
    "sigreg": (stm.SIGRegInfoNCE, {"weight": 0.0, "sigreg": stm.SIGReg(8)}),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("negatives", [NEGATIVES, None], ids=["own counts", "shared counts"])
@BATCHING
def test_equals_the_formula(model, name, negatives, mini_batch_size):
    loss_class, options = LOSSES[name]
    prior = DocumentPrior.from_counts(model, POSITIVES, negatives)
    options = options | {"scale": 3.0, "mini_batch_size": mini_batch_size, "same_text": "keep"}
    loss = loss_class(model, prior=prior, **options).double()
    batch = features(model, BATCH)
    value = loss([dict(column) for column in batch])
    value = value["infonce"] if isinstance(value, dict) else value
    value.backward()
    found = gradients(model)
    model.zero_grad()
    embeddings = raw_embeddings(model, batch)
    expected = reference(embeddings, loss.similarity, loss.terms, 3.0, log_q(BATCH, negatives))
    expected.backward()
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-6, atol=0)
    assert_same_gradients(found, gradients(model), rtol=1e-5, atol=1e-7)
    uncorrected = loss_class(model, **options).double()([dict(column) for column in batch])
    uncorrected = uncorrected["infonce"] if isinstance(uncorrected, dict) else uncorrected
    assert abs(uncorrected.item() - value.item()) > 1e-2


@BATCHING
def test_queries_as_columns_were_drawn_once(model, mini_batch_size):
    prior = DocumentPrior.from_counts(model, POSITIVES, NEGATIVES)
    options = {"prior": prior, "mini_batch_size": mini_batch_size, "same_text": "keep"}
    loss = stm.CosineRankingLoss(model, directions=("query_to_doc", "query_to_query"), **options)
    batch = features(model, BATCH)
    queries, *documents = raw_embeddings(model, batch)
    of_documents = 20 * stm.COSINE(queries, torch.cat(documents)) - log_q(BATCH, NEGATIVES)
    of_queries = 20 * stm.COSINE(queries, queries) + math.log(sum(POSITIVES.values()))
    of_queries = of_queries.masked_fill(torch.eye(len(BATCH), dtype=torch.bool), -torch.inf)
    expected = cross_entropy(torch.cat([of_documents, of_queries], dim=1), torch.arange(len(BATCH)))
    torch.testing.assert_close(loss(batch).detach(), expected.detach(), rtol=1e-6, atol=0)


def test_equal_counts_change_nothing(model):
    """But for explicit negatives, whose counts are others."""
    rows = [row[:2] for row in BATCH]
    prior = DocumentPrior.from_texts(model, [row[1] for row in rows])
    values = [stm.QNormRankingLoss(model, prior=p, scale=3.0)(features(model, rows)) for p in (prior, None)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


def test_config_is_json(model):
    loss = stm.CosineRankingLoss(model, prior=DocumentPrior.from_counts(model, POSITIVES, NEGATIVES))
    assert json.loads(json.dumps(loss.get_config_dict()))["prior"] == {"texts": 5, "negatives": 2, "smoothing": 1.0}


# --- training ---------------------------------------------------------------------------------------------------------


def skewed(num_topics=8, per_topic=4, num_pairs=1200):
    """Pairs of a query and a document of its topic, where every fourth document has 85 % of its topic's pairs.

    The other words of a query are noise, so popularity alone tells the documents of a topic apart.
    """
    generator = random.Random(0)
    words = sorted({word for row in ROWS for text in row for word in text.split() if word.isalpha()})
    generator.shuffle(words)
    topics, marks, noise = words[:num_topics], words[num_topics : num_topics * (per_topic + 1)], words[-30:]
    documents = [f"{topics[i // per_topic]} {mark}" for i, mark in enumerate(marks)]

    def query(topic):
        return " ".join([topics[topic], *generator.sample(noise, 3)])

    pairs = []
    for _ in range(num_pairs):
        topic, [rank] = generator.randrange(num_topics), generator.choices(range(per_topic), [17, 1, 1, 1])
        pairs.append((query(topic), documents[topic * per_topic + rank]))
    queries = {str(i): query(i % num_topics) for i in range(5 * num_topics)}
    popular = {i: {documents[int(i) % num_topics * per_topic]} for i in queries}
    return pairs, stm.RetrievalData(queries, {text: text for text in documents}, popular)


@pytest.mark.parametrize("loss_class", [stm.CosineRankingLoss, stm.QNormRankingLoss])
def test_popular_documents_are_found(tmp_path, loss_class):
    """Without a prior the loss learns to rank as if all documents of a topic were equally frequent."""
    pairs, data = skewed()
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*pairs, strict=True)), strict=True)))
    ndcg = {}
    for corrected in (False, True):
        torch.manual_seed(0)
        model = SentenceTransformer(modules=[StaticEmbedding(tokenizer(), embedding_dim=32)], device="cpu")
        prior = DocumentPrior.from_texts(model, rows["positive"]) if corrected else None
        options = {"max_steps": 120, "per_device_train_batch_size": 64, "learning_rate": 0.1}
        train(model, loss_class(model, prior=prior), tmp_path, data=rows, attach=False, **options)
        task = data.encode(model, show_progress_bar=False)
        ndcg[corrected] = task.ndcg(task.top(stm.Similarity.named(model.similarity_fn_name))).mean()
    assert ndcg[True] > max(0.97, ndcg[False] + 0.05), ndcg


def test_resumes_and_leaves_no_trace(folder, tmp_path):
    """The resumed run is the uninterrupted one, and a fresh process loads a model like any other."""
    data = Dataset.from_dict(
        dict(zip(("anchor", "positive", "negative"), map(list, zip(*BATCH * 3, strict=True)), strict=True))
    )
    options = {"data": data, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "attach": False}
    models = [load_transformer(folder) for _ in range(3)]
    priors = [DocumentPrior.from_counts(models[0], POSITIVES, NEGATIVES)] * 2 + [None]
    losses = [stm.CosineRankingLoss(m, prior=p) for m, p in zip(models, priors, strict=True)]
    assert all(loss.state_dict().keys() == losses[2].state_dict().keys() for loss in losses)
    train(models[0], losses[0], tmp_path / "run", **options)
    train(models[1], losses[1], tmp_path / "again", resume=str(tmp_path / "run" / "checkpoint-2"), **options)
    train(models[2], losses[2], tmp_path / "without", **options)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=0, atol=1e-6)
    saved = []
    for model, name in ((models[0], "with"), (models[2], "plain")):
        model.save_pretrained(str(tmp_path / name))
        saved.append({str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*")})
    assert saved[0] == saved[1]
    code = (
        "import sys; from sentence_transformers import SentenceTransformer as S; "
        "print(S(sys.argv[1], device='cpu').encode('tea')[0], 'st_magnitude' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "with")], capture_output=True, text=True, check=True
    )
    number, imported = done.stdout.split()[-2:]
    assert float(number) == pytest.approx(models[0].encode("tea")[0], rel=1e-4)
    assert imported == "False"


# --- two processes ----------------------------------------------------------------------------------------------------

CASES = list(itertools.product((True, "ring"), (None, 3), (("query_to_doc",), ("query_to_doc", "doc_to_query"))))


def value_and_gradients(folder, case, rows):
    gather, mini_batch_size, direction = case
    model = load_transformer(folder).double()
    prior = DocumentPrior.from_counts(model, POSITIVES, NEGATIVES)
    options = {
        "mini_batch_size": mini_batch_size,
        "directions": direction,
        "partition_mode": "per_direction",
        "scale": 3.0,
        "prior": prior,
    }
    loss = stm.QNormRankingLoss(model, **options, gather_across_devices=dist.is_initialized() and gather)
    if dist.is_initialized():
        loss.model = DistributedDataParallel(model)
    value = loss(features(model, rows))
    value.backward()
    return value.item(), gradients(model)


def one_rank(folder):
    rank = dist.get_rank()
    cuts = [2 if case[0] == "ring" else 3 for case in CASES]  # the ring takes batches that differ in size
    return [
        value_and_gradients(folder, c, BATCH[cut:] if rank else BATCH[:cut]) for c, cut in zip(CASES, cuts, strict=True)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have used torch")
def test_two_ranks_are_one_process_on_the_joined_batch(folder):
    first, second = on_ranks(2, one_rank, folder)
    for i, case in enumerate(CASES):
        value, expected = value_and_gradients(folder, case, BATCH)
        assert (first[i][0] + second[i][0]) / 2 == pytest.approx(value, rel=1e-7)
        for rank in (first, second):
            assert_same_gradients(rank[i][1], expected, rtol=1e-6, atol=1e-9)
