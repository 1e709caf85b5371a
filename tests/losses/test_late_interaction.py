"""LateInteractionLoss: the formula, sentence-transformers' losses, a Trainer, two processes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from _helpers import BATCHING, assert_same_gradients, gradients, logged, train, value_and_gradients
from _ranks import on_ranks
from _tiny import ROWS, columns, load_tokens
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.multi_vector_encoder.scoring import colbert_scores, mean_colbert_scores
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm

TRAINER = (MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments)
SIMILARITIES = [stm.COSINE, stm.DOT, stm.QNORM, stm.DNORM, stm.Similarity(1, 0.3)]


def prepared(folder, similarity):
    gammas = [float(gamma == 1) for gamma in similarity.exponents]
    return stm.prepare(load_tokens(folder), stm.Similarity(*gammas))


def batch(model, num_rows=8, num_negatives=1, start=0):
    rows = [row[: 2 + num_negatives] for row in ROWS[start : start + num_rows]]
    tasks = ["query"] + ["document"] * (1 + num_negatives)
    pairs = zip(zip(*rows, strict=True), tasks, strict=True)
    return [dict(model.preprocess(list(column), task=task)) for column, task in pairs]


def raw_tokens(folder, dtype=torch.float64):
    """A model without normalisation, and a matrix of the tokens of each text that count."""
    model = load_tokens(folder, normalize=False).to(dtype)
    texts = []
    for features, task in zip(batch(model), ("query", "document", "document"), strict=True):
        output = model(dict(features), task=task)
        masks = output["attention_mask"].bool()
        texts.append([x[mask] for x, mask in zip(output["token_embeddings"], masks, strict=True)])
    return model, texts


def reference(texts, similarity, temperature, log_q=None, mean=True):
    """The formula of the docstring, one pair of texts at a time."""
    queries, *columns = texts
    documents = [document for column in columns for document in column]
    query_norms, norms = (torch.cat(group).norm(dim=1) for group in (queries, documents))
    gamma_query, gamma_document = similarity.exponents
    size = query_norms.mean() ** (1 - gamma_query) * norms.mean() ** (1 - gamma_document)
    loss = 0.0
    for i, q in enumerate(queries):
        q = q / q.norm(dim=1, keepdim=True) ** gamma_query
        scores = []
        for d in documents:
            best = (q @ (d / d.norm(dim=1, keepdim=True) ** gamma_document).T).max(dim=1).values
            scores.append(best.mean() if mean else best.sum())
        logits = torch.stack(scores) / (temperature * size)
        if log_q is not None:
            logits = logits - log_q
        loss = loss + (logits.logsumexp(dim=0) - logits[i]) / len(queries)
    return loss


@BATCHING
@pytest.mark.parametrize(("mean", "corrected"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("similarity", SIMILARITIES, ids=lambda similarity: similarity.name)
def test_formula(folder, similarity, mean, corrected, mini_batch_size):
    prior = log_q = None
    by_hand, texts = raw_tokens(folder)
    model = prepared(folder, similarity).double()
    if corrected:
        counts = {row[1]: i + 1 for i, row in enumerate(ROWS)}
        prior = stm.DocumentPrior.from_texts(
            model, counts, {"see below": 7, "returns a number": 2}, task="document"
        )
        log_q = torch.cat(prior.log_q(batch(model)[1:])).double()
        assert len(log_q.unique()) > 8
    expected = reference(texts, similarity, 0.2, log_q, mean)
    expected.backward()
    options = {"mini_batch_size": mini_batch_size, "prior": prior}
    loss = stm.LateInteractionLoss(
        model, similarity, temperature=0.2, length_normalize=mean, **options
    )
    found = loss(batch(model))
    found.backward()
    # sentence-transformers returns scores in float32.
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(model), gradients(by_hand), rtol=1e-4, atol=1e-6)


def both_ways(folder, mini_batch_size, num_negatives, mean, num_rows=8, start=0, **options):
    """Value and gradients of this loss by cosine, and of sentence-transformers'."""
    scoring = mean_colbert_scores if mean else colbert_scores
    theirs = MultiVectorMultipleNegativesRankingLoss
    if mini_batch_size is not None:
        options["mini_batch_size"] = mini_batch_size
        theirs = CachedMultiVectorMultipleNegativesRankingLoss
    ours = partial(
        stm.LateInteractionLoss, similarity="cosine", temperature=0.07, length_normalize=mean
    )
    found = []
    for build in (ours, partial(theirs, similarity_fct=scoring, scale=1 / 0.07)):
        model = load_tokens(folder)
        found.append(
            value_and_gradients(
                model, build(model, **options)(batch(model, num_rows, num_negatives, start))
            )
        )
    return found


def rank_both_ways(folder, mini_batch_size):
    return both_ways(
        folder, mini_batch_size, 1, True, 6, 6 * dist.get_rank(), gather_across_devices=True
    )


@BATCHING
def test_cosine_is_the_loss_of_sentence_transformers(folder, mini_batch_size):
    found = [
        both_ways(folder, mini_batch_size, number, mean) for number, mean in ((0, True), (2, False))
    ]
    for (value, ours), (expected, theirs) in [
        *found,
        *on_ranks(2, rank_both_ways, folder, mini_batch_size),
    ]:
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        assert_same_gradients(ours, theirs, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(
    ("prepare_for", "similarity", "advice"),
    [
        ("cosine", "qnorm", "qnorm"),
        ("cosine", "dot", "dot"),
        ("dot", "qnorm", "qnorm"),
        ("qnorm", "cosine", "cosine"),
        ("cosine", stm.Similarity(1, 0.5), "qnorm"),
    ],
)
def test_a_model_that_would_not_score_as_it_is_trained(folder, prepare_for, similarity, advice):
    model = stm.prepare(load_tokens(folder), prepare_for)
    with pytest.raises(ValueError, match=rf"Call stm.prepare\(model, '{advice}'\)"):
        stm.LateInteractionLoss(model, similarity)
    stm.LateInteractionLoss(stm.prepare(model, advice), similarity)


def test_arguments(folder):
    model = prepared(folder, stm.QNORM)
    with pytest.raises(ValueError, match="needs at least two text columns"):
        stm.LateInteractionLoss(model)(batch(model)[:1])
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        stm.LateInteractionLoss(model, temperature=0)


@BATCHING
def test_training_lowers_the_loss_resumes_and_is_saved(folder, tmp_path, mini_batch_size):
    runs = []
    options = {"learning_rate": 2e-3, "max_steps": 20, "save_strategy": "steps", "save_steps": 18}
    options |= {"trainer": TRAINER, "attach": False}
    for resume in (None, str(tmp_path / "0" / "checkpoint-18")):
        model, output = prepared(folder, stm.QNORM), tmp_path / str(len(runs))
        loss = stm.LateInteractionLoss(model, temperature=0.2, mini_batch_size=mini_batch_size)
        trainer = train(model, loss, output, 1, resume=resume, **options)
        runs.append((model, logged(trainer, "loss")))
    (model, losses), (resumed, _) = runs
    assert losses[-1] < losses[0] - 0.3
    assert_same_gradients(
        dict(resumed.named_parameters()), dict(model.named_parameters()), rtol=1e-6, atol=1e-7
    )
    path = stm.export(model, tmp_path / "model")
    loaded = MultiVectorEncoder(str(path), device="cpu")
    assert loaded.similarity_fn_name == "meanmaxsim"
    texts = columns()
    found, expected = (
        m.similarity(m.encode_query(texts["anchor"]), m.encode_document(texts["positive"]))
        for m in (loaded, model)
    )
    torch.testing.assert_close(found, expected)
    assert "length_normalize" in (path / "README.md").read_text()


def of_one_batch(folder, mini_batch_size, num_rows):
    model, is_rank = prepared(folder, stm.DOT).double(), dist.is_initialized()
    options = {"gather_across_devices": is_rank, "mini_batch_size": mini_batch_size}
    prior = stm.DocumentPrior.from_texts(model, {row[1]: i + 1 for i, row in enumerate(ROWS)})
    loss = stm.LateInteractionLoss(model, "dot", prior=prior, **options)
    if is_rank:
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    return value_and_gradients(
        model, loss(batch(model, num_rows, start=num_rows * dist.get_rank() if is_rank else 0))
    )


@BATCHING
def test_two_processes_are_one_batch(folder, mini_batch_size):
    """Norms and prior included."""
    value, expected = of_one_batch(folder, None, 12)
    ranks = on_ranks(2, of_one_batch, folder, mini_batch_size, 6)
    torch.testing.assert_close(sum(value for value, _ in ranks) / 2, value, rtol=1e-6, atol=1e-6)
    for _, found in ranks:
        assert_same_gradients(found, expected, rtol=1e-4, atol=1e-6)
