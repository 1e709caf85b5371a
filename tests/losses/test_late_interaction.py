"""LateInteractionLoss: a reference in float64, sentence-transformers' losses, the Trainer, and two processes."""

import pytest
import torch
import torch.distributed as dist
from _helpers import assert_same_gradients, gradients
from _ranks import on_ranks
from _tiny import ROWS, columns, load_tokens
from datasets import Dataset
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

pytestmark = pytest.mark.usefixtures("one_thread")

BATCHING = pytest.mark.parametrize("mini_batch_size", [None, 3], ids=["plain", "cached"])
SIMILARITIES = {
    "cosine": stm.COSINE,
    "dot": stm.DOT,
    "qnorm": stm.QNORM,
    "dnorm": stm.DNORM,
    "fractional": stm.Similarity(1, 0.3),
}


def prepared(folder, similarity):
    gammas = [float(gamma == 1) for gamma in similarity.exponents]
    return stm.prepare(load_tokens(folder), stm.Similarity(*gammas))


def batch(model, num_rows=8, num_negatives=1, start=0):
    rows = [row[: 2 + num_negatives] for row in ROWS[start : start + num_rows]]
    tasks = ["query"] + ["document"] * (1 + num_negatives)
    pairs = zip(zip(*rows, strict=True), tasks, strict=True)
    return [dict(model.preprocess(list(column), task=task)) for column, task in pairs]


def raw_tokens(folder, dtype=torch.float64):
    """A model without normalisation, and the tokens of each text that count, one matrix a text: with gradients."""
    model = load_tokens(folder, normalize=False).to(dtype)
    texts = []
    for features, task in zip(batch(model), ("query", "document", "document"), strict=True):
        output = model(dict(features), task=task)
        masks = output["attention_mask"].bool()
        texts.append([x[mask] for x, mask in zip(output["token_embeddings"], masks, strict=True)])
    return model, texts


def reference(texts, similarity, temperature, mean=True, penalty=0.0, log_q=None):
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
    return loss + penalty * norms.mean() / norms.square().mean().sqrt()


@BATCHING
@pytest.mark.parametrize("length_normalize", [True, False])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_formula(folder, name, length_normalize, mini_batch_size):
    similarity = SIMILARITIES[name]
    penalty = 0.5 if similarity.exponents[1] < 1 else 0.0
    by_hand, texts = raw_tokens(folder)
    expected = reference(texts, similarity, 0.2, length_normalize, penalty)
    expected.backward()
    model = prepared(folder, similarity).double()
    options = {"length_normalize": length_normalize, "norm_penalty": penalty, "mini_batch_size": mini_batch_size}
    loss = stm.LateInteractionLoss(model, similarity, temperature=0.2, **options)
    found = loss(batch(model))
    found.backward()
    # sentence-transformers returns scores in float32.
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(model), gradients(by_hand), rtol=1e-4, atol=1e-6)


@BATCHING
@pytest.mark.parametrize("length_normalize", [True, False])
@pytest.mark.parametrize("num_negatives", [0, 2])
def test_cosine_is_the_loss_of_sentence_transformers(folder, length_normalize, num_negatives, mini_batch_size):
    ours, theirs = (load_tokens(folder) for _ in range(2))
    options = {"length_normalize": length_normalize, "mini_batch_size": mini_batch_size}
    found = stm.LateInteractionLoss(ours, "cosine", temperature=0.07, **options)(batch(ours, 8, num_negatives))
    score = mean_colbert_scores if length_normalize else colbert_scores
    options = {"scale": 1 / 0.07, "similarity_fct": score}
    if mini_batch_size is None:
        loss = MultiVectorMultipleNegativesRankingLoss(theirs, **options)
    else:
        loss = CachedMultiVectorMultipleNegativesRankingLoss(theirs, mini_batch_size=mini_batch_size, **options)
    expected = loss(batch(theirs, 8, num_negatives))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.backward()
    expected.backward()
    assert_same_gradients(gradients(ours), gradients(theirs), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_common_factor_of_all_tokens_changes_nothing(folder, factor):
    """Neither the softmax nor the penalty can be satisfied by the size of the norms."""
    found = []
    for by in (1.0, factor):
        model = prepared(folder, stm.DOT).double()
        model[1].linear.weight.data *= by
        found.append(stm.LateInteractionLoss(model, "dot", norm_penalty=1.0)(batch(model)).double())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_the_penalty_lowers_the_share_of_norm_that_small_tokens_have(folder):
    """Its gradient shrinks the tokens whose norm lies below the mean square over the mean, and no others."""
    model = prepared(folder, stm.QNORM)
    loss = stm.LateInteractionLoss(model, norm_penalty=1.0)
    torch.manual_seed(1)
    tokens = (torch.randn(4, 2, 6, 16) * torch.rand(4, 2, 6, 1)).requires_grad_()
    mask = torch.rand(4, 2, 6) < 0.8
    columns = [[torch.randn(4, 5, 16)], *([tokens[:, i]] for i in range(2))]
    masks = [[torch.ones(4, 5, dtype=torch.bool)], *([mask[:, i]] for i in range(2))]
    value = loss.calculate_loss(columns, masks)
    loss.norm_penalty = 0.0
    (grad,) = torch.autograd.grad(value - loss.calculate_loss(columns, masks), tokens)
    norms = tokens.detach().norm(dim=-1)
    outward = (grad * tokens.detach()).sum(dim=-1) / norms
    turning = norms[mask].square().mean() / norms[mask].mean()
    clear = mask & ((norms - turning).abs() > 1e-3)
    assert torch.equal(outward[clear] > 0, norms[clear] < turning)
    assert (outward[~mask] == 0).all()


@BATCHING
def test_prior(folder, mini_batch_size):
    _, texts = raw_tokens(folder)
    model = prepared(folder, stm.QNORM).double()
    counts = {row[1]: i + 1 for i, row in enumerate(ROWS)}
    prior = stm.DocumentPrior.from_counts(model, counts, {"see below": 7, "returns a number": 2}, task="document")
    log_q = torch.cat(prior.log_q(batch(model)[1:])).double()
    assert len(log_q.unique()) > 8
    expected = reference(texts, stm.QNORM, 0.2, log_q=log_q)
    loss = stm.LateInteractionLoss(model, temperature=0.2, prior=prior, mini_batch_size=mini_batch_size)
    torch.testing.assert_close(loss(batch(model)).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_prior_of_other_texts_warns(folder, caplog):
    model = prepared(folder, stm.QNORM)
    loss = stm.LateInteractionLoss(model, prior=stm.DocumentPrior.from_texts(model, ["tea"]))
    for _ in range(2):
        loss(batch(model))
    assert caplog.text.count("contains none of the 8 positives") == 1


@pytest.mark.parametrize("name", ["qnorm", "dot"])
def test_bf16(folder, name):
    """Under autocast the values stay close, and gradients are finite."""
    model = prepared(folder, SIMILARITIES[name])
    loss = stm.LateInteractionLoss(model, name, temperature=0.2, norm_penalty=0.1)
    expected = loss(batch(model))
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(batch(model))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    found.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


# --- what is refused --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("similarity", "options", "message"),
    [
        ("qnorm", {"temperature": 0}, "temperature must be a positive number"),
        ("qnorm", {"norm_penalty": -1}, "norm_penalty must be at least 0"),
        ("dnorm", {"norm_penalty": 0.1}, "for documents whose norms count"),
        ("qnorm", {"mini_batch_size": 0}, "mini_batch_size must be at least 1"),
    ],
)
def test_arguments(folder, similarity, options, message):
    with pytest.raises(ValueError, match=message):
        stm.LateInteractionLoss(prepared(folder, SIMILARITIES[similarity]), similarity, **options)


def test_one_column(folder):
    model = prepared(folder, stm.QNORM)
    with pytest.raises(ValueError, match="needs at least two text columns"):
        stm.LateInteractionLoss(model)(batch(model)[:1])


# --- the Trainer ------------------------------------------------------------------------------------------------------


def train(model, loss, output, resume=None, **options):
    defaults = {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 2e-3, "save_strategy": "no"}
    args = MultiVectorEncoderTrainingArguments(
        str(output), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, **defaults | options
    )
    data = Dataset.from_dict(columns(num_negatives=1))
    trainer = MultiVectorEncoderTrainer(model, args, train_dataset=data, loss=loss)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@BATCHING
def test_training_lowers_the_loss_and_the_model_is_saved_for_it(folder, tmp_path, mini_batch_size):
    model = prepared(folder, stm.QNORM)
    loss = stm.LateInteractionLoss(model, temperature=0.2, norm_penalty=0.1, mini_batch_size=mini_batch_size)
    losses = train(model, loss, tmp_path / "run", max_steps=20)
    assert losses[-1] < losses[0] - 0.3
    path = stm.export(model, tmp_path / "model")
    loaded = MultiVectorEncoder(str(path), device="cpu")
    assert loaded.similarity_fn_name == "meanmaxsim"
    texts = columns()
    found, expected = (
        m.similarity(m.encode_query(texts["anchor"]), m.encode_document(texts["positive"])) for m in (loaded, model)
    )
    torch.testing.assert_close(found, expected)
    assert "norm_penalty" in (path / "README.md").read_text()


def test_a_resumed_run_is_the_same_run(folder, tmp_path):
    weights = []
    for steps, resume in ((4, None), (4, str(tmp_path / "0" / "checkpoint-2"))):
        model = prepared(folder, stm.QNORM)
        output = tmp_path / str(len(weights))
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": steps, "lr_scheduler_type": "constant"}
        train(model, stm.LateInteractionLoss(model, norm_penalty=0.1), output, resume, **options)
        weights.append({name: p.detach() for name, p in model.named_parameters()})
    assert_same_gradients(*weights, rtol=1e-6, atol=1e-7)


@BATCHING
def test_lora(folder, tmp_path, mini_batch_size):
    peft = pytest.importorskip("peft")
    model = prepared(folder, stm.QNORM)
    model.add_adapter(peft.LoraConfig(target_modules=["q_lin", "v_lin"], r=2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, stm.LateInteractionLoss(model, mini_batch_size=mini_batch_size), tmp_path, max_steps=2)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("lora_A" in name for name in changed)
    assert not any("base_layer" in name or "ffn" in name for name in changed)


# --- two processes ----------------------------------------------------------------------------------------------------


def rank_against_sentence_transformers(folder, mini_batch_size):
    start, results = 6 * dist.get_rank(), []
    options = {"gather_across_devices": True, "mini_batch_size": mini_batch_size}
    for is_ours in (True, False):
        model = load_tokens(folder)
        if is_ours:
            loss = stm.LateInteractionLoss(model, "cosine", temperature=0.07, **options)
        elif mini_batch_size is None:
            loss = MultiVectorMultipleNegativesRankingLoss(
                model, scale=1 / 0.07, similarity_fct=mean_colbert_scores, **options
            )
        else:
            loss = CachedMultiVectorMultipleNegativesRankingLoss(
                model, scale=1 / 0.07, similarity_fct=mean_colbert_scores, **options
            )
        value = loss(batch(model, 6, start=start))
        value.backward()
        results.append((value.detach(), gradients(model)))
    return results


@BATCHING
def test_cosine_gathers_as_sentence_transformers_does(folder, mini_batch_size):
    for (found, ours), (expected, theirs) in on_ranks(2, rank_against_sentence_transformers, folder, mini_batch_size):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert_same_gradients(ours, theirs, rtol=1e-3, atol=2e-6)


def rank_of_one_batch(folder, mini_batch_size):
    model = prepared(folder, stm.DOT).double()
    options = {"norm_penalty": 0.3, "gather_across_devices": True, "mini_batch_size": mini_batch_size}
    prior = stm.DocumentPrior.from_counts(model, {row[1]: i + 1 for i, row in enumerate(ROWS)})
    loss = stm.LateInteractionLoss(model, "dot", temperature=0.2, prior=prior, **options)
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    value = loss(batch(model, 6, start=6 * dist.get_rank()))
    value.backward()
    return value.detach(), gradients(model)


@BATCHING
def test_two_processes_are_one_batch(folder, mini_batch_size):
    """Norms, prior and penalty included."""
    model = prepared(folder, stm.DOT).double()
    prior = stm.DocumentPrior.from_counts(model, {row[1]: i + 1 for i, row in enumerate(ROWS)})
    expected = stm.LateInteractionLoss(model, "dot", temperature=0.2, prior=prior, norm_penalty=0.3)(batch(model, 12))
    expected.backward()
    ranks = on_ranks(2, rank_of_one_batch, folder, mini_batch_size)
    torch.testing.assert_close(sum(value for value, _ in ranks) / 2, expected.detach(), rtol=1e-6, atol=1e-6)
    for _, found in ranks:
        assert_same_gradients(found, gradients(model), rtol=1e-4, atol=1e-6)
