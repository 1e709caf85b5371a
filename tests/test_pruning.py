"""NormPruning: which tokens it keeps, the three ways to use it, and the threshold of a corpus."""

import pytest
import torch
from _tiny import ROWS, load_tokens
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorInformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.modules import WordEmbeddings
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

import st_magnitude as stm

DOCUMENTS = [row[1] for row in ROWS]


@pytest.fixture
def tokens(folder):
    return stm.prepare(load_tokens(folder), "qnorm")


@pytest.mark.parametrize("exponent", [0.0, 0.75, 1.0])
def test_tokens_above_the_threshold_are_kept(exponent):
    documents = [torch.randn(n, 4, dtype=torch.float64) * 2 for n in (7, 1, 30)]
    documents.append(torch.full((3, 4), 1e-3, dtype=torch.float64))
    found = stm.NormPruning(2.5, exponent=exponent).pool(documents)
    for kept, document in zip(found, documents, strict=True):
        norms = [sum(x * x for x in row) ** 0.5 for row in document.tolist()]
        rows = [i for i, norm in enumerate(norms) if norm > 2.5] or [norms.index(max(norms))]
        expected = torch.stack([document[i] / norms[i] ** exponent for i in rows])
        torch.testing.assert_close(kept, expected, rtol=1e-12, atol=0)
    assert len(found[3]) == 1


def test_zero_tokens_have_norm_zero():
    document = torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, 0.9]])
    pruning = stm.NormPruning(0.4, exponent=0.0)
    assert torch.equal(pruning.pool([document])[0], document[1:])
    assert torch.equal(stm.NormPruning(2.0, exponent=0.0).pool([document])[0], document[2:])


def test_half_precision_and_an_empty_document_stay():
    documents = [torch.randn(5, 8).to(torch.bfloat16) * 100, torch.empty(0, 8)]
    kept, nothing = stm.NormPruning(1.0, exponent=1.0).pool(documents)
    assert kept.dtype == torch.bfloat16
    torch.testing.assert_close(kept.float().norm(dim=1), torch.ones(5), rtol=1e-2, atol=0)
    assert nothing.shape == (0, 8)


@pytest.mark.parametrize("share", [0.15, 0.5, 1.0])
def test_the_threshold_keeps_a_share(tokens, share):
    pruning = stm.NormPruning.fit(tokens, DOCUMENTS, share, show_progress_bar=False)
    embeddings = tokens.encode_document(DOCUMENTS)
    norms = torch.cat(embeddings).norm(dim=1)
    assert (norms > pruning.threshold).sum() == round(share * len(norms))
    assert len(torch.cat(pruning.pool(embeddings))) >= round(share * len(norms))


def test_the_three_ways_are_one(tokens, tmp_path):
    pruning = stm.NormPruning.fit(tokens, DOCUMENTS, 0.3, show_progress_bar=False)
    expected = pruning.pool(tokens.encode_document(DOCUMENTS))
    by_call = tokens.encode_document(DOCUMENTS, token_pooling=pruning)
    tokens.append(pruning)
    tokens.save_pretrained(str(tmp_path))
    loaded = MultiVectorEncoder(str(tmp_path), trust_remote_code=True, device="cpu")
    assert loaded[-1].get_config_dict() == pruning.get_config_dict()
    for found in (by_call, tokens.encode_document(DOCUMENTS), loaded.encode_document(DOCUMENTS)):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)
    queries = [row[0] for row in ROWS]
    for x, y in zip(loaded.encode_query(queries), tokens.encode_query(queries), strict=True):
        assert torch.equal(x, y)


def test_the_evaluator_of_sentence_transformers_measures_it():
    """The short vector of "so" has the direction of the query; without it, d2 is the best."""
    vectors = torch.tensor([[2.0, 0.0], [0.5, 0.0], [0.0, 3.0], [1.0, 3.0]])
    tokenizer = WhitespaceTokenizer(["bees", "so", "honey", "wax"], stop_words=())
    model = MultiVectorEncoder(modules=[WordEmbeddings(tokenizer, vectors)], device="cpu")
    corpus = {"d1": "honey so", "d2": "wax"}
    evaluator = MultiVectorInformationRetrievalEvaluator({"q": "bees"}, corpus, {"q": {"d2"}})
    reciprocal_ranks = []
    for threshold in (0.0, 1.0):
        model.append(stm.NormPruning(threshold, exponent=1.0))
        reciprocal_ranks.append(evaluator(model)["maxsim_mrr@10"])
        del model[-1]
    assert reciprocal_ranks == [0.5, 1.0]


def test_errors(folder, tokens):
    with pytest.raises(ValueError, match="have the same norm"):
        stm.NormPruning.fit(load_tokens(folder), DOCUMENTS, show_progress_bar=False)
    with pytest.raises(ValueError, match="share must lie in"):
        stm.NormPruning.fit(tokens, DOCUMENTS, 15)
    with pytest.raises(ValueError, match="threshold must be at least 0"):
        stm.NormPruning(-1)
