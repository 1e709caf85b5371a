"""Ranking losses on a SparseEncoder: sentence-transformers, texts of the batch, the Trainer."""

import pytest
import torch
from _helpers import assert_same_gradients, features, gradients, logged, train
from _tiny import columns, load_transformer, raw_embeddings, save_transformer
from sentence_transformers import (
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.sparse_encoder.losses import (
    CachedSpladeLoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from sentence_transformers.util import cos_sim, dot_score
from transformers import AutoModelForMaskedLM

import st_magnitude as stm
from st_magnitude.kernel.terms import LearnedTemperature
from st_magnitude.losses import with_texts

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = {"document_regularizer_weight": 3e-3, "query_regularizer_weight": 5e-3}
WRAPPERS = {
    "plain": SpladeLoss,
    "cached": lambda *args, **options: CachedSpladeLoss(*args, **options, mini_batch_size=3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_transformer(tmp_path_factory.mktemp("masked"), auto=AutoModelForMaskedLM)


@pytest.fixture
def model(folder):
    """A SPLADE, in float64."""
    return SparseEncoder(folder, device="cpu").double()


@pytest.fixture(params=WRAPPERS)
def splade(request):
    """Makes the loss of sentence-transformers around a ranking loss."""
    return lambda inner, **options: WRAPPERS[request.param](
        inner.model, inner, **(WEIGHTS | options)
    )


def run(loss, batch):
    """Its terms, and the gradients of what it trains."""
    loss.zero_grad()
    terms = loss([dict(column) for column in batch], None)
    sum(terms.values()).backward()
    return {name: term.item() for name, term in terms.items()}, gradients(loss)


def repeated(model):
    """A batch in which two queries have the same positive, with a column of negatives."""
    texts = columns(8, 1)
    texts["positive"][3] = texts["positive"][0]
    return [dict(model.preprocess(column)) for column in texts.values()]


# --- the same loss as theirs ----------------------------------------------------------------------

JOINT = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
HARD = {"hardness_mode": "hard_negatives", "hardness_strength": 0.4}


@pytest.mark.parametrize(("num_negatives", "options"), [(0, {}), (2, {}), (1, JOINT), (1, HARD)])
@pytest.mark.parametrize(
    ("ours", "score", "scale"),
    [(stm.DotRankingLoss, dot_score, 2.5), (stm.CosineRankingLoss, cos_sim, 20.0)],
)
def test_equal_to_sparse_mnrl(model, splade, ours, score, scale, num_negatives, options):
    batch = features(model, 8, num_negatives)
    theirs = SparseMultipleNegativesRankingLoss(model, scale=scale, similarity_fct=score, **options)
    expected, reference = run(splade(theirs), batch)
    found, gradient = run(splade(ours(model, scale=scale, same_text="keep", **options)), batch)
    assert model.similarity_fn_name == ("cosine" if score is cos_sim else "dot")
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(gradient, reference, rtol=1e-7)


# --- with the texts of the batch ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"margin": -0.5}, {"guide": "sparse"}, {"guide": "dense"}, {"prior": True}]
)
def test_hands_on_the_texts(model, splade, folder, tmp_path, options):
    """The loss inside gives what it gives alone, which is another value than without texts."""
    batch = repeated(model)
    options = dict(options)
    if options.get("guide") == "sparse":
        options["guide"] = SparseEncoder(folder, device="cpu")
        options["guide"][0].auto_model.requires_grad_(
            False
        ).distilbert.embeddings.word_embeddings.weight.mul_(-1)
    elif options.get("guide") == "dense":
        options["guide"] = load_transformer(save_transformer(tmp_path))
    if "prior" in options:
        options["prior"] = stm.DocumentPrior.from_texts(
            model, columns()["positive"] + 9 * columns(1)["positive"]
        )
    inner = stm.DotRankingLoss(model, scale=1.0, **options)
    alone = inner([dict(column) for column in batch])
    alone.backward()
    expected = gradients(model)
    loss = with_texts(splade(inner, document_regularizer_weight=0.0, query_regularizer_weight=0.0))
    found, gradient = run(loss, batch)
    assert found["base_loss"] == pytest.approx(alone.item(), rel=1e-6)
    assert_same_gradients(
        {name.removeprefix("model."): x for name, x in gradient.items()}, expected, rtol=1e-7
    )
    keep = stm.DotRankingLoss(model, scale=1.0, same_text="keep").compute_loss_from_embeddings(
        raw_embeddings(model, batch)
    )
    assert abs(found["base_loss"] - keep.item()) > 1e-3


@pytest.mark.parametrize("option", ["prior", "guide"])
def test_what_needs_texts_is_refused_without(model, splade, folder, option):
    prior = stm.DocumentPrior.from_texts(model, ["tea"])
    given = prior if option == "prior" else SparseEncoder(folder, device="cpu")
    loss = splade(stm.DotRankingLoss(model, **{option: given}))
    with pytest.raises(
        ValueError, match=r"(DocumentPrior|Guide), which needs the texts.*with_texts\(SpladeLoss"
    ):
        loss(features(model))


def test_repeated_texts_without_texts_warn_once(model, splade, caplog):
    for options, times in (({}, 1), ({"same_text": "keep"}, 0)):
        caplog.clear()
        loss = splade(stm.DotRankingLoss(model, **options))
        for _ in range(2):
            loss(features(model))
        assert len([r for r in caplog.records if r.name.startswith("st_magnitude")]) == times


def test_with_texts_takes_a_loss_around_ours(model):
    theirs = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), **WEIGHTS)
    for loss, inside in (
        (theirs, "SparseMultipleNegativesRankingLoss"),
        (stm.DotRankingLoss(model), "NoneType"),
    ):
        with pytest.raises(TypeError, match=f"around {inside}"):
            with_texts(loss)


# --- a learned temperature, and the Trainer -------------------------------------------------------


def test_trained_saved_and_loaded(folder, splade, tmp_path):
    model = SparseEncoder(folder, device="cpu")
    prior = stm.DocumentPrior.from_texts(model, columns()["positive"])
    inner = stm.DotRankingLoss(model, scale=1.0, temperature="learned", prior=prior, margin=-0.5)
    loss = with_texts(splade(inner))
    batch = features(model, 16, 1)
    before = inner([dict(column) for column in batch]).item()
    options = {"learning_rate": 1e-4, "max_steps": 6}
    options |= {"learning_rate_mapping": LearnedTemperature.learning_rate_mapping(1e-2)}
    options |= {"trainer": (SparseEncoderTrainer, SparseEncoderTrainingArguments)}
    trainer = train(model, loss, tmp_path / "run", 1, **options)
    assert len(set(logged(trainer))) > 1
    assert inner(batch).item() < 0.9 * before
    model.save_pretrained(str(tmp_path / "model"))
    loaded = SparseEncoder(str(tmp_path / "model"), device="cpu")
    assert loaded.similarity_fn_name == "dot"
    found, expected = (
        m.encode(columns()["anchor"], convert_to_sparse_tensor=False) for m in (loaded, model)
    )
    torch.testing.assert_close(found, expected)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "SpladeLoss" in card
    assert "DotRankingLoss" in card
