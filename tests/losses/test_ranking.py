"""Ranking losses against the formula, against autograd, and against sentence-transformers."""

import inspect
import itertools
import typing
from functools import partial

import pytest
import torch
from _losses import (
    BATCHING,
    DIRECTIONS,
    assert_same,
    assert_same_gradients,
    features,
    gradients,
    value_and_gradients,
)
from _tiny import auto_scale, formula, load_transformer, raw_embeddings, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score

import st_magnitude as stm
from st_magnitude import Similarity, Term
from st_magnitude.losses.ranking import TermOptions
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("in_float64")

EXPONENTS = {
    stm.CosineRankingLoss: (1.0, 1.0),
    stm.DotRankingLoss: (0.0, 0.0),
    stm.QNormRankingLoss: (1.0, 0.0),
    stm.DNormRankingLoss: (0.0, 1.0),
    stm.LearnableNormLoss: (0.3, 0.6),
}
WITH_NORMS = list(EXPONENTS)[1:]  # all but Cosine


def build(loss_class, model, **options):
    if loss_class is stm.LearnableNormLoss:
        options = (
            dict(zip(("gamma_query", "gamma_document"), EXPONENTS[loss_class], strict=True))
            | options
        )
    return loss_class(model, **options).double()


def reference_gradients(model, columns, exponents, scale, **options):
    """Of the formula, by autograd through the model; exponents from the model, if it has some."""
    if isinstance(model[-1], ExponentNorm):
        exponents = model[-1].similarity.gamma_query, model[-1].similarity.gamma_document
    return value_and_gradients(
        model, formula(raw_embeddings(model, columns), exponents, scale, **options)
    )


GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
UPSTREAM = [{}, {"directions": GTE}, {"directions": GTE[::2], "partition_mode": "per_direction"}]


@pytest.mark.parametrize(
    ("loss_class", "function", "scale", "num_negatives"),
    [(stm.CosineRankingLoss, cos_sim, 20.0, 2), (stm.DotRankingLoss, dot_score, 1.5, 0)],
)
@pytest.mark.parametrize(
    "options", UPSTREAM, ids=lambda options: "-".join(map(str, options.values()))
)
def test_equals_sentence_transformers(model, num_negatives, loss_class, function, scale, options):
    """Plain and cached; the texts of the batch differ, so no document is excluded."""
    columns = features(model, num_negatives=num_negatives)
    options = options | {"scale": scale}
    for theirs, caching in (
        (MultipleNegativesRankingLoss, {}),
        (CachedMultipleNegativesRankingLoss, {"mini_batch_size": 3}),
    ):
        losses = (
            loss_class(model, **options, **caching),
            theirs(model, similarity_fct=function, **options, **caching),
        )
        assert_same(model, *(loss([dict(x) for x in columns], None) for loss in losses))


@pytest.mark.parametrize("loss_class", EXPONENTS)
@pytest.mark.parametrize(
    ("direction", "num_negatives"), list(zip(DIRECTIONS, (2, 2, 0), strict=True)), ids=str
)
def test_equals_the_formula(model, loss_class, direction, num_negatives):
    """Plain and cached."""
    columns = features(model, num_negatives=num_negatives)
    options = {"scale": 3.0, "directions": direction, "partition_mode": "per_direction"}
    losses = [build(loss_class, model, **options, mini_batch_size=size) for size in (None, 3)]
    expected, expected_gradients = reference_gradients(
        model, columns, EXPONENTS[loss_class], 3.0, direction=direction
    )
    for loss in losses:
        value, found = value_and_gradients(model, loss(columns))
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
        assert_same_gradients(found, expected_gradients)
        with torch.no_grad():  # as in evaluation
            value = loss(columns)
        assert not value.requires_grad
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        loss.compute_loss_from_embeddings(raw_embeddings(model, columns)).detach(), expected
    )


@pytest.mark.parametrize(
    ("loss_class", "mini_batch_size"), list(zip(EXPONENTS, (3, None, 3, None, 3), strict=True))
)
def test_auto_scale(model, loss_class, mini_batch_size):
    """The size of the scores is that of the batch, with its gradient; twice the norm is nothing."""
    loss = build(loss_class, model, scale="auto", mini_batch_size=mini_batch_size)
    columns, exponents, values = features(model, num_negatives=1), EXPONENTS[loss_class], []
    for _ in range(2):
        embeddings = raw_embeddings(model, columns)
        by_hand = formula(embeddings, exponents, auto_scale(embeddings, exponents))
        values.append(loss([dict(column) for column in columns]))
        assert_same(model, values[-1], by_hand, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for parameter in model[0].model.transformer.layer[-1].output_layer_norm.parameters():
                parameter.mul_(0.5)
    assert values[0].item() == pytest.approx(values[1].item(), rel=1e-5)


@BATCHING
@pytest.mark.parametrize("factor", [1 / 4, 2.0**16])
def test_outer_factor(model, mini_batch_size, factor):
    """Gradient accumulation divides the loss, a GradScaler multiplies it."""
    columns = features(model)
    loss = build(stm.LearnableNormLoss, model, scale=3.0, mini_batch_size=mini_batch_size)
    _, expected = reference_gradients(model, columns, None, 3.0)
    assert {"2.scaled_query_bias", "2.scaled_document_bias"} < expected.keys()
    (loss(columns) * factor).backward()
    assert_same_gradients(gradients(model), expected, factor)
    (loss(columns) * factor).backward()  # a second micro-batch adds up
    assert_same_gradients(gradients(model), expected, 2 * factor)


@pytest.mark.parametrize("loss_class", [stm.QNormRankingLoss, stm.LearnableNormLoss])
def test_second_pass_draws_the_dropout_of_the_first(tmp_path, loss_class):
    model = load_transformer(save_transformer(tmp_path, dropout=0.3)).double().train()
    loss, seen = build(loss_class, model, scale=3.0, mini_batch_size=3), []
    loss(features(model))  # after which it knows whether the model reads padding
    model[1].register_forward_hook(
        lambda _, __, out: seen.append(out["sentence_embedding"].detach().clone())
    )
    loss(features(model)).backward()
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss(features(model))
    assert not torch.equal(seen[0], seen[len(first) * 2])  # there was something to draw
    assert min(map(len, seen)) == 2
    seen.clear()
    loss.mini_batch_num_tokens = 12  # which one long text has
    loss(features(model)).backward()
    assert min(map(len, seen)) == 1


@pytest.mark.parametrize(
    "loss_class",
    [
        *WITH_NORMS,
        partial(stm.CosineRankingLoss, regularizers=[stm.SIGReg(8)]),
        partial(stm.CosineRankingLoss, terms=[Term(), Term(16)]),
    ],
)
@BATCHING
def test_refuses_matryoshka_loss(model, loss_class, mini_batch_size):
    alone = build(loss_class, model, scale=3.0, mini_batch_size=mini_batch_size)
    loss = MatryoshkaLoss(model, alone, [32, 16])
    with pytest.raises(ValueError, match=r"terms=\[Term\(dim=128\)"):
        loss(features(model), None)


@BATCHING
def test_cosine_in_matryoshka_loss(model, mini_batch_size):
    columns = features(model)
    loss = MatryoshkaLoss(
        model, stm.CosineRankingLoss(model, mini_batch_size=mini_batch_size), [32, 16], [1, 0.5]
    )
    embeddings = raw_embeddings(model, columns)
    by_hand = formula(embeddings, (1, 1), 20) + 0.5 * formula(embeddings, (1, 1), 20, dim=16)
    assert_same(model, loss(columns, None), by_hand)


COLUMNS = [
    ["bread and butter", "", "a river"],  # a text without tokens in the middle, and at the end
    ["wine", "the long way over the bridge", ""],
    ["tea", "forest", "an old engine in the forest"],
]


@pytest.mark.parametrize(("more", "number"), [({}, 1), ({"task": "query"}, 3)])
def test_columns_of_a_table_share_one_pass(static_path, more, number):
    """Each pass has a dense gradient of the size of the table. What a Router or another module
    reads of a column stays with the column."""
    model = SentenceTransformer(str(static_path), device="cpu")
    table = model[0].embedding
    loss = stm.MagnitudeRankingLoss(model, "dot", same_text="keep")

    def features():
        first, *others = map(model.preprocess, COLUMNS)
        return [first | more, *others]

    separate = [model(column)["sentence_embedding"] for column in features()]
    expected = torch.autograd.grad(sum(x.square().sum() for x in separate), table.weight)
    passes = []
    table.register_forward_hook(lambda *_: passes.append(1))
    found = loss.embed(features())
    torch.testing.assert_close(found, separate)
    assert len(passes) == number
    gradient = torch.autograd.grad(sum(x.square().sum() for x in found), table.weight)
    torch.testing.assert_close(gradient, expected)


def test_a_matryoshka_of_a_table_is_that_of_sentence_transformers(static_path):
    model = SentenceTransformer(str(static_path), device="cpu")
    ours = MatryoshkaLoss(model, stm.CosineRankingLoss(model, same_text="keep"), [64, 16])
    features = [model.preprocess([text or "leaf" for text in column]) for column in COLUMNS]
    found = ours([dict(x) for x in features], None)
    gradient = torch.autograd.grad(found, model[0].embedding.weight)
    theirs = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [64, 16])
    expected = theirs([dict(x) for x in features], None)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, model[0].embedding.weight)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0}, "scale must be"),
        ({"mini_batch_size": 0}, "mini_batch_size must be"),
        ({"directions": ("query_to_doc", "sideways")}, "sideways"),
        ({"similarity": "euclidean"}, "euclidean"),
        ({"terms": ()}, "at least one Term"),
        ({"terms": [32, 16]}, r"Term\(dim=128\); got 32"),
        ({"terms": [None]}, "such as .* got None"),
        ({"scale": 50.0, "temperature": 0.02}, "set the same factor"),
        ({"labels": "rating"}, "labels must be one of"),
        ({"gather_across_devices": "all"}, "gather_across_devices must be one of"),
        ({"labels": "teacher", "teacher_weight": 1.5}, "teacher_weight"),
        ({"teacher_weight": 0.5}, "for labels='teacher'"),
        ({"keep_explicit_negatives": True}, "Give a margin"),
        ({"terms": [Term(33)]}, r"\[33\] exceed the 32 dimensions"),
    ],
)
def test_arguments_are_checked(model, options, message):
    with pytest.raises(ValueError, match=message):
        stm.MagnitudeRankingLoss(model, **options)


def test_learnable_goes_on_from_the_models_exponents(model, folder):
    stm.prepare(model, Similarity(0.2, 0.7))
    loss = stm.LearnableNormLoss(model)
    assert [type(m).__name__ for m in model] == ["Transformer", "Pooling", "ExponentNorm"]
    assert loss.similarity.exponents == pytest.approx((0.2, 0.7))
    assert model[-1].learnable
    assert model[-1].scaled_query_bias.requires_grad
    with pytest.raises(ValueError, match="strictly between"):
        # a sigmoid never leaves its end
        stm.LearnableNormLoss(stm.prepare(model, Similarity(1.0, 0.5)))
    with pytest.raises(ValueError, match="strictly between"):
        stm.LearnableNormLoss(load_transformer(folder), 0.5, 1.0)


DIFFERING = [
    [1.0, 0.0, 0.2],
    [0, 1, 0],
    [True, False, True],
    [4, 4, 4],
    [[1.0]] * 3,
    [torch.nan] * 3,
]


@pytest.mark.parametrize("before", [None, 0.0, 1.0])
@pytest.mark.parametrize("labels", DIFFERING, ids=str)
def test_labels_are_refused(model, labels, before):
    """Also after batches in which all labels were alike."""
    batch = features(model, 3)
    for takes_texts in (False, True):
        loss = stm.CosineRankingLoss(model)
        call = loss if takes_texts else loss.compute_loss_from_embeddings
        given = batch if takes_texts else raw_embeddings(model, batch)
        if before is not None:
            call(given, torch.full((3,), before))
        with pytest.raises(ValueError, match=r"SimilarityMSELoss.*remove_columns"):
            call(given, torch.tensor(labels))


@pytest.mark.parametrize("value", [0, 1, 1.0, True])
@BATCHING
def test_labels_that_say_nothing_are_left_out(model, caplog, value, mini_batch_size):
    loss = stm.QNormRankingLoss(model, mini_batch_size=mini_batch_size)
    batch = [features(model, 3, start=start) for start in (0, 3)]
    expected = [loss([dict(x) for x in columns]).detach() for columns in batch]
    assert not caplog.records
    found = [loss(columns, torch.full((3,), value)).detach() for columns in batch]
    assert found == expected
    [said] = caplog.records
    assert f"all {float(value):g} say nothing to QNormRankingLoss" in said.message
    with pytest.raises(ValueError, match="neither all 1 nor all 0"):
        loss(features(model, 3), torch.full((3,), 1 - value))


@pytest.mark.parametrize("loss_class", [stm.DotRankingLoss, stm.SimilarityMSELoss])
def test_columns_of_unequal_length_are_refused(model, loss_class):
    loss, batch = loss_class(model), features(model, 3)
    labels = torch.ones(3) if loss_class is stm.SimilarityMSELoss else None
    with pytest.raises(ValueError, match="two text columns"):
        loss(batch[:1], labels)
    batch[1] = features(model, 1)[1]
    for call, given in (
        (loss.compute_loss_from_embeddings, raw_embeddings(model, batch)),
        (loss, batch),
    ):
        with pytest.raises(ValueError, match=r"have \(3, 1\)"):
            call(given, labels)


@pytest.mark.parametrize(
    ("first", "second", "contradicts"),
    [
        (stm.DotRankingLoss, stm.CosineRankingLoss, True),
        (stm.DotRankingLoss, stm.QNormRankingLoss, False),
        (stm.CosineRankingLoss, stm.DNormRankingLoss, False),
        (stm.CosineRankingLoss, stm.LearnableNormLoss, True),
        (stm.LearnableNormLoss, stm.DotRankingLoss, True),
        (lambda model: stm.SimilarityMSELoss(model, "dot"), stm.CosineRankingLoss, True),
    ],
)
def test_contradicting_losses_warn(model, caplog, first, second, contradicts):
    losses = [first(model), second(model)]
    for loss in losses:
        loss(features(model, 3), torch.ones(3) if isinstance(loss, stm.SimilarityMSELoss) else None)
    assert contradicts == bool(caplog.records)


def test_learned_exponents_are_described_after_the_model_has_lost_them(model):
    loss = stm.LearnableNormLoss(model)
    stm.prepare(model, "cosine")
    assert loss.get_config_dict()["similarity"] == {"query": 0.5, "document": 0.5}


@pytest.mark.parametrize(
    "loss_class", [*EXPONENTS, partial(stm.SimilarityMSELoss, similarity="dot")]
)
def test_columns_without_norms_have_finite_gradients(model, loss_class):
    """Of queries, of positives, or of both: empty texts of a static table have the norm 0."""
    loss = loss_class(model)
    has_negatives = isinstance(loss, stm.MagnitudeRankingLoss)
    for norm, small in itertools.product((0.0, 1e-12, 1e-38), ([0], [1], [0, 1])):
        embeddings = [torch.randn(4, 8, dtype=torch.float32) for _ in range(2 + has_negatives)]
        for i in small:
            embeddings[i] = norm * torch.nn.functional.normalize(embeddings[i])
        embeddings = [x.requires_grad_() for x in embeddings]
        value = loss.compute_loss_from_embeddings(
            embeddings, None if has_negatives else torch.rand(4)
        )
        value.backward()
        assert value.isfinite()
        for i, x in enumerate(embeddings):
            assert x.grad.isfinite().all()
            assert x.grad.abs().max() < 1e3 or (norm and i in small)  # a cosine's is 1 / norm


def test_nan_names_its_column_or_regularizer(model, caplog):
    loss, embeddings = stm.DotRankingLoss(model, scale=1.0), [torch.randn(3, 4) for _ in range(3)]
    loss.compute_loss_from_embeddings(embeddings)
    assert not caplog.text
    embeddings[1][2, 0] = torch.nan
    for _ in range(2):
        loss.compute_loss_from_embeddings(embeddings)
    assert caplog.text.count("nan or infinity is in text column 2 of 3") == 1
    loss = stm.DotRankingLoss(model, scale=1.0, regularizers=[lambda x: x.sum() * torch.nan])
    loss.compute_loss_from_embeddings([torch.randn(3, 4), torch.randn(3, 4)])
    assert "nan or infinity is in <lambda>." in caplog.text


def test_options_have_the_types_of_the_signature(model):
    """Type checkers and editors know the options of the classes that hand them on."""
    shown = inspect.signature(stm.MagnitudeRankingLoss, eval_str=True).parameters
    known = {name: x.annotation for name, x in shown.items() if name not in ("model", "similarity")}
    assert typing.get_type_hints(TermOptions) == known
    with pytest.raises(TypeError, match="margins"):
        stm.TempAggLoss(model, margins=0.1)


def test_a_corner_keeps_its_similarity(model):
    assert stm.CosineRankingLoss(model, "cosine").similarity == stm.COSINE
    with pytest.raises(ValueError, match="MagnitudeRankingLoss"):
        stm.CosineRankingLoss(model, similarity="qnorm")
