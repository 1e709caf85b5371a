import math
import pickle

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score

from st_magnitude import COSINE, DNORM, DOT, QNORM, Similarity

CORNERS = [COSINE, DOT, QNORM, DNORM]


def loop_score(q, d, gamma_query, gamma_document):
    """Eq. 7 in plain Python."""
    norm_q, norm_d = math.sqrt(sum(x * x for x in q)), math.sqrt(sum(x * x for x in d))
    return sum(
        (x / norm_q**gamma_query) * (y / norm_d**gamma_document) for x, y in zip(q, d, strict=True)
    )


@pytest.fixture
def pair():
    return torch.randn(3, 7, dtype=torch.float64) * 4, torch.randn(5, 7, dtype=torch.float64) * 2


@pytest.mark.parametrize("exponents", [(1, 1), (0, 0), (1, 0), (0, 1), (0.3, 0.8)])
def test_equals_eq_7(pair, exponents):
    queries, documents = pair
    rows = [[loop_score(q, d, *exponents) for d in documents.tolist()] for q in queries.tolist()]
    expected = torch.tensor(rows, dtype=torch.float64)
    similarity = Similarity(*exponents)
    torch.testing.assert_close(similarity(queries, documents), expected)
    found = similarity.pairwise(queries, documents[:3])
    torch.testing.assert_close(found, expected.diagonal())


def test_corners_are_the_known_functions(pair):
    queries, documents = (x.float() for x in pair)
    torch.testing.assert_close(COSINE(queries, documents), cos_sim(queries, documents))
    torch.testing.assert_close(DOT(queries, documents), dot_score(queries, documents))
    of_queries, of_documents = queries.norm(dim=1)[:, None], documents.norm(dim=1)
    cosines = cos_sim(queries, documents)
    torch.testing.assert_close(QNORM(queries, documents), cosines * of_documents)
    torch.testing.assert_close(DNORM(queries, documents), cosines * of_queries)


@pytest.mark.parametrize("similarity", [*CORNERS, Similarity(0.5, 0.5)])
def test_zero_vectors_score_zero_with_finite_gradients(similarity):
    queries, documents = torch.zeros(2, 4, requires_grad=True), torch.randn(3, 4)
    documents[1] = 0
    documents.requires_grad_()
    scores = similarity(queries, documents)
    assert (scores == 0).all()
    scores.sum().backward()
    assert queries.grad.isfinite().all()
    assert documents.grad.isfinite().all()
    gammas = [torch.tensor(0.5, requires_grad=True) for _ in range(2)]
    Similarity(*gammas)(torch.zeros(1, 3), torch.zeros(1, 3)).sum().backward()
    assert [g.grad.item() for g in gammas] == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_low_precision_is_computed_in_float32(dtype):
    queries, documents = (torch.randn(2, 16) * 8).to(dtype), (torch.randn(3, 16) * 8).to(dtype)
    assert COSINE(queries, documents).dtype == torch.float32
    expected = QNORM(queries.float(), documents.float())
    torch.testing.assert_close(QNORM(queries, documents), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = QNORM(queries.float(), documents.float())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_accepts_what_evaluators_pass(pair):
    queries, documents = pair
    expected = QNORM(queries, documents)
    torch.testing.assert_close(QNORM(queries.numpy(), list(documents)), expected)
    found = QNORM(queries.tolist()[0], documents.numpy())
    torch.testing.assert_close(found, expected[:1], rtol=1e-5, atol=1e-5)
    assert QNORM(np.ones((2, 3), dtype=np.float64), np.ones((2, 3))).dtype == torch.float64


def test_names():
    for name, similarity in zip(("cosine", "dot", "qnorm", "dnorm"), CORNERS, strict=True):
        assert Similarity.named(name.upper()) is similarity
        assert similarity.name == name
    assert Similarity.named(QNORM) is QNORM
    assert Similarity(1.0, 0.5).name == "exponents 1 and 0.5"
    assert Similarity(1, 0) == QNORM != Similarity(1, 0.5)
    assert QNORM != "qnorm"
    learned = torch.tensor(0.0)  # equal to itself alone, because its value may change
    assert Similarity(1, learned) == Similarity(1, learned) != QNORM
    assert Similarity(1, learned) != Similarity(1, learned.clone())
    assert hash(Similarity(1, 0)) == hash(QNORM)
    assert pickle.loads(pickle.dumps(QNORM)) == QNORM
    assert repr(QNORM) == "Similarity(gamma_query=1.0, gamma_document=0.0)"
    with pytest.raises(ValueError, match="euclid"):
        Similarity.named("euclid")


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
def test_exponents_are_checked(bad):
    with pytest.raises(ValueError, match="gamma_document"):
        Similarity(0.5, bad)
    with pytest.raises(ValueError, match="0-d"):
        Similarity(torch.ones(2), 0.5)


def test_is_a_similarity_fct_of_sentence_transformers(static_model):
    loss = MultipleNegativesRankingLoss(static_model, similarity_fct=QNORM, scale=3.0)
    queries, documents = torch.randn(4, 8), torch.randn(4, 8)
    expected = torch.nn.functional.cross_entropy(3 * QNORM(queries, documents), torch.arange(4))
    found = loss.compute_loss_from_embeddings([queries, documents], None)
    torch.testing.assert_close(found, expected)
    assert isinstance(loss.get_config_dict()["similarity_fct"], str)
