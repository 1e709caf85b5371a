"""ExponentNorm: by role, in training, and through saving and loading."""

import math

import pytest
import torch
from _tiny import ROWS, columns
from _trainer import make_trainer
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import encode_raw

TEXTS = [row[1] for row in ROWS[:5]]


def divided(rows, gamma):
    """x / |x|^gamma in Python floats."""
    norms = [math.hypot(*row) for row in rows.tolist()]
    pairs = zip(rows.tolist(), norms, strict=True)
    return torch.tensor([[x / norm**gamma for x in row] for row, norm in pairs])


@pytest.mark.parametrize(
    ("task", "feature", "gamma"),
    [
        ("query", None, 0.3),
        ("document", None, 0.8),
        (None, None, 0.8),
        (None, "query", 0.3),
        (None, "document", 0.8),
        # what encode_document says counts for more than what training left behind
        ("document", "query", 0.8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_exponent_by_role(task, feature, gamma, dtype):
    embeddings = (torch.randn(4, 6) * 3).to(dtype)
    features = {"sentence_embedding": embeddings} | ({"task": feature} if feature else {})
    out = ExponentNorm(gamma_query=0.3, gamma_document=0.8)(features, task=task)
    torch.testing.assert_close(out["sentence_embedding"], divided(embeddings, gamma).to(dtype))
    assert out["raw_embedding"] is embeddings
    torch.testing.assert_close(out["exponents"], torch.tensor([[0.3, 0.8]] * 4))
    # MatryoshkaLoss and others keep the dict that they gave
    assert features["sentence_embedding"] is embeddings


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("task", ["query", "document"])
def test_ends_of_the_range(gamma, task):
    embeddings = torch.randn(4, 6) * 3
    embeddings[1] = 0.0
    embeddings.requires_grad_()
    norm = ExponentNorm(gamma, gamma, learnable=True)
    assert (norm.gamma_query, norm.gamma_document) == (gamma, gamma)
    out = norm({"sentence_embedding": embeddings}, task=task)["sentence_embedding"]
    expected = embeddings if gamma == 0 else torch.nn.functional.normalize(embeddings)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    assert embeddings.grad.isfinite().all()
    assert [p.grad for p in norm.parameters()] == [0.0, 0.0]


@pytest.mark.parametrize("gain", [1, 512])
def test_gamma_is_the_sigmoid_of_a_bias_and_learns(gain):
    embeddings, logit = torch.randn(4, 6, dtype=torch.float64) * 3, math.log(0.3 / 0.7)
    norm = ExponentNorm(0.3, 0.8, learnable=True).double()
    norm.learn(gain)
    assert norm.scaled_query_bias.item() == pytest.approx(logit / gain)

    def total(bias):
        return (embeddings / embeddings.norm(dim=1, keepdim=True) ** torch.sigmoid(bias)).sum()

    expected = torch.autograd.functional.jacobian(total, torch.tensor(logit, dtype=torch.float64))
    norm({"sentence_embedding": embeddings}, task="query")["sentence_embedding"].sum().backward()
    torch.testing.assert_close(norm.scaled_query_bias.grad, expected, rtol=1e-6, atol=0)
    assert norm.scaled_document_bias.grad == 0
    assert not any(p.requires_grad for p in ExponentNorm().parameters())


def test_encode_knows_the_role(model):
    raw = model.encode(TEXTS, convert_to_tensor=True)
    model.append(ExponentNorm(0.3, 0.8))
    torch.testing.assert_close(model.encode_query(TEXTS, convert_to_tensor=True), divided(raw, 0.3))
    for encode in (model.encode_document, model.encode):
        torch.testing.assert_close(encode(TEXTS, convert_to_tensor=True), divided(raw, 0.8))
    rows = model.encode(TEXTS[:2], output_value=None, truncate_dim=5)
    torch.testing.assert_close(torch.stack([row["raw_embedding"] for row in rows]), raw[:2])
    prefixes = torch.stack([row["sentence_embedding"] for row in rows])
    torch.testing.assert_close(prefixes, divided(raw[:2, :5], 0.8))


DIMS = (256, 128, 64, 7)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_truncate_dim_gives_what_every_evaluator_reports(task, static_model, gamma):
    """A prefix is cut first and divided by a power of its own norm."""
    corpus = list(task["corpus"].values())
    raw = static_model.encode(corpus, convert_to_tensor=True)
    modules = [static_model[0], ExponentNorm(1.0, gamma)]
    model = SentenceTransformer(modules=modules, similarity_fn_name="dot", device="cpu")
    reported = CompressionEvaluator(**task, dims=DIMS, precisions=["float32"])(model)
    for dim in DIMS:
        expected = divided(raw[:, :dim], gamma)
        found = model.encode_document(corpus, truncate_dim=dim, convert_to_tensor=True)
        torch.testing.assert_close(found, expected)
        with model.truncate_embeddings(dim):  # what setting model.truncate_dim does
            torch.testing.assert_close(model.encode(corpus, convert_to_tensor=True), expected)
            served = InformationRetrievalEvaluator(**task)(model)["dot_ndcg@10"]
        assert served == pytest.approx(reported[f"float32_{dim}_ndcg@10"], abs=1e-12)
    assert reported["float32_7_ndcg@10"] != reported["full_ndcg@10"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefixes_after_an_evaluation_in_half_precision(model, tmp_path, dtype):
    """accelerate makes a new output of the model, in float32."""
    model.append(ExponentNorm(0.3, 0.8)).to(dtype)
    data = Dataset.from_dict(columns(4))
    loss = stm.MagnitudeRankingLoss(model, stm.Similarity(0.3, 0.8))
    trainer = make_trainer(model, loss, tmp_path, eval_data=data, bf16=True)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    raw = encode_raw(model, TEXTS, "document")
    for dim in (5, 32):
        found = trainer.model.encode_document(TEXTS, truncate_dim=dim, convert_to_tensor=True)
        torch.testing.assert_close(found.float(), divided(raw[:, :dim], 0.8), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("gain", [1, 512])
def test_saved_and_loaded_bit_for_bit(model, tmp_path, gain):
    """Also by sentence-transformers, for a caller who trusts the code, whatever the gain."""
    model.append(ExponentNorm(0.3, 0.8))
    model[-1].learn(gain)
    model.similarity_fn_name = "dot"
    with torch.no_grad():  # a value that no configuration file could hold exactly
        model[-1].scaled_document_bias.add_(1e-3 / 3)
    model.save_pretrained(str(tmp_path))
    loaded = stm.load(tmp_path, device="cpu")
    assert isinstance(loaded[-1], ExponentNorm)
    assert loaded.similarity_fn_name == "dot"
    assert loaded[-1].scaled_query_bias.requires_grad
    assert loaded[-1].similarity.exponents == model[-1].similarity.exponents
    state = load_file(tmp_path / "2_ExponentNorm" / "model.safetensors")
    assert state == loaded[-1].state_dict() == model[-1].state_dict()
    assert state["query_bias"].item() == pytest.approx(math.log(0.3 / 0.7))
    model[-1].load_state_dict(state)
    assert loaded[-1].similarity.exponents == model[-1].similarity.exponents
    assert (loaded.encode_document(TEXTS) == model.encode_document(TEXTS)).all()
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path), device="cpu")
    trusted = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert (trusted.encode_query(TEXTS) == model.encode_query(TEXTS)).all()


def test_no_weight_decay_in_the_trainer(model, tmp_path):
    """For the two exponents; matrices of the encoder decay."""
    trainer = make_trainer(model, stm.LearnableNormLoss(model), tmp_path, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    decay = {p: group["weight_decay"] for group in groups for p in group["params"]}
    matrix = next(p for p in model[0].parameters() if p.ndim == 2)
    assert [decay[p] for p in (*model[-1].parameters(), matrix)] == [0.0, 0.0, 0.1]
