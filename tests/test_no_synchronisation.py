"""A training step does not wait for the device: forward passes on fake CUDA tensors, whose values cannot be read."""

from __future__ import annotations

import pytest
import torch
from _tiny import ROWS, load_tokens, load_transformer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import st_magnitude as stm
from st_magnitude import Similarity, Term, infonce
from st_magnitude.modules import ExponentNorm


@pytest.fixture
def fake():
    """Tensors without values: item(), tolist(), nonzero(), unique(), bool() and mixed devices raise."""
    with FakeTensorMode():
        yield


def on_device(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=dtype.is_floating_point)


def test_values_cannot_be_read(fake):
    with pytest.raises(Exception, match="local_scalar_dense"):
        on_device(3).sum().item()


BOTH = ("query_to_doc", "doc_to_query")
ALL = (*BOTH, "query_to_query", "doc_to_doc")
WEIGHTED = {"hardness_mode": "all_negatives", "hardness_strength": 0.5}
OPTIONS = {
    "plain": {},
    "hardness": WEIGHTED,
    "directions": {"directions": ALL, "hardness_mode": "hard_negatives", "hardness_strength": 0.5},
    "ids": {"exclude": lambda: on_device(10, dtype=torch.int64)},
    "function": {"exclude": lambda: lambda rows, scores: scores > scores.diagonal(2 + rows.start)[:, None] + 0.1},
    "labels": {"positives": lambda: on_device(10, dtype=torch.int64), **WEIGHTED},
    "pairs": {"positives": lambda: on_device(4, 10, dtype=torch.bool)},
    "log_q": {"log_q": lambda: on_device(10), "log_q_queries": lambda: on_device(6)},
    "precision": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("is_learned", [False, True])
def test_infonce(fake, options, is_learned):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    if "positives" not in options or options["positives"].dtype != torch.bool:
        options["all_queries"] = on_device(6, 8)
    elif "log_q_queries" in options:
        options["log_q_queries"] = on_device(4)
    terms, similarity = [Term(dim, tau) for dim in (3, None) for tau in (0.1, 0.05)], Similarity(1, 0)
    if is_learned:
        terms = [Term(term.dim, on_device() + 0.1) for term in terms]
        similarity = Similarity(on_device(), on_device())
    softmaxes = {} if "directions" in options else {"directions": BOTH, "partition_mode": "per_direction"}
    options |= {"offset": 2, "tile_rows": 3, **softmaxes}
    loss = infonce(on_device(4, 8), on_device(10, 8), terms, similarity, **options)
    assert loss.shape == ()
    assert loss.device.type == "cuda"


# --- losses -----------------------------------------------------------------------------------------------------------

TEXTS = [row[:3] for row in ROWS[:6]]
LOSSES = {
    "cosine": (stm.CosineRankingLoss, {}),
    "keep": (stm.CosineRankingLoss, {"same_text": "keep"}),
    "margin": (stm.QNormRankingLoss, {"margin": -0.1, "margin_strategy": "relative"}),
    "guide": (stm.QNormRankingLoss, {"guide": True}),
    "prior": (stm.DNormRankingLoss, {"prior": True}),
    "hardness": (stm.DotRankingLoss, WEIGHTED),
    "joint": (stm.CosineRankingLoss, {"directions": ("query_to_doc", "query_to_query"), "prior": True}),
    "learned": (stm.DotRankingLoss, {"temperature": "learned", "prior": True}),
    "learnable": (stm.LearnableNormLoss, {"prior": True}),
    "temp_agg": (stm.TempAggLoss, {"similarity": "qnorm"}),
    "temp_agg_mrl": (stm.TempAggMRLLoss, {"similarity": "qnorm", "temperature": "learned"}),
    "sigreg": (stm.SIGRegInfoNCE, {"prior": True, "margin": -0.1}),
    "sigreg of prefixes": (stm.SIGRegInfoNCE, {"sigreg": stm.SIGReg(dims=(8, 32))}),
    "regression": (stm.SimilarityMSELoss, {}),
}


class Encoder(nn.Module):
    """A model on the device, with learned exponents."""

    def __init__(self):
        super().__init__()
        with torch.device("cuda"):
            self.table = nn.Embedding(300, 32)
            self.norm = ExponentNorm(0.5, 0.5, learnable=True)

    def to(self, device):
        return self

    def forward(self, features):
        return features | {"sentence_embedding": self.table(features["input_ids"]).mean(dim=1)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mini_batch_size", [None, 4], ids=["plain", "cached"])
def test_a_step_of_a_loss(folder, name, mini_batch_size):
    """After the first batch, whose values a loss may read, and up to the backward pass.

    The mini-batches of a cached step are cut by sentence-transformers, which reads the longest text of each.
    """
    (loss_class, options), model = LOSSES[name], load_transformer(folder)
    if options.get("guide"):
        options = options | {"guide": load_transformer(folder, "cls")}
    if options.get("prior"):
        options = options | {"prior": stm.DocumentPrior.from_texts(model, [row[1] for row in TEXTS])}
        options["prior"]._has_begun = True
    loss = loss_class(model, scale=3.0, **options)
    loss._has_begun = True
    is_ranking = isinstance(loss, stm.MagnitudeRankingLoss)
    texts = list(zip(*TEXTS, strict=True))[: 3 if is_ranking else 2]
    batch = [model.preprocess(list(column)) for column in texts]
    with FakeTensorMode(allow_non_fake_inputs=True):
        loss.model = Encoder()
        columns = [
            {k: on_device(*v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v for k, v in features.items()}
            for features in batch
        ]
        if getattr(loss, "temperatures", None) is not None:
            loss.temperatures.bias = nn.Parameter(torch.empty(len(loss.temperatures.bias), device="cuda"))
        if options.get("guide"):
            loss.false_negatives.guide.model = loss.model
        if mini_batch_size is None or not is_ranking:
            value = loss(columns, None if is_ranking else torch.empty(6, device="cuda"))
        else:
            width = 32 + len(loss._learned())
            parts = [[on_device(4, width), on_device(2, width)] for _ in columns]
            value = loss.calculate_loss(parts, loss.read(columns))
        value = sum(value.values()) if isinstance(value, dict) else value
        assert value.device.type == "cuda"


class TokenEncoder(nn.Module):
    """A vector for every token."""

    def __init__(self):
        super().__init__()
        with torch.device("cuda"):
            self.table = nn.Embedding(300, 16)

    def forward(self, features, task=None):
        return features | {"token_embeddings": self.table(features["input_ids"])}


@pytest.mark.parametrize("mini_batch_size", [None, 4], ids=["plain", "cached"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "qnorm"])
def test_a_step_of_late_interaction(folder, similarity, mini_batch_size):
    """With the scoring of sentence-transformers, which on several processes reads the longest text of all of them."""
    model = stm.prepare(load_tokens(folder), similarity)
    prior = stm.DocumentPrior.from_texts(model, [row[1] for row in TEXTS])
    penalty = 0.0 if similarity == "cosine" else 0.1
    loss = stm.LateInteractionLoss(model, similarity, norm_penalty=penalty, prior=prior)
    prior._has_begun = True
    batch = [model.preprocess(list(column)) for column in zip(*TEXTS, strict=True)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        loss.model = TokenEncoder()
        columns = [
            {k: on_device(*v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v for k, v in features.items()}
            for features in batch
        ]
        if mini_batch_size is None:
            value = loss(columns)
        else:
            loss._log_q = prior.log_q(columns[1:])
            parts = [[on_device(4, 7, 16), on_device(2, 5, 16)] for _ in columns]
            masks = [[on_device(4, 7, dtype=torch.bool), on_device(2, 5, dtype=torch.bool)] for _ in columns]
            value = loss.calculate_loss(parts, masks)
        assert value.device.type == "cuda"
