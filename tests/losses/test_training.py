"""Losses in the Trainer: what is logged, resumed, and shared between processes."""

from contextlib import nullcontext

import pytest
import torch
from _losses import features
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, columns, load_transformer
from _trainer import make_trainer, train
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.losses import temp_agg_mrl


def test_attach_is_idempotent(folder, tmp_path):
    model = load_transformer(folder)
    trainer = train(model, stm.DotRankingLoss(model), tmp_path, max_steps=2)
    callbacks = list(trainer.callback_handler.callbacks)
    assert stm.attach(stm.attach(trainer)) is trainer
    assert trainer.callback_handler.callbacks == callbacks


@pytest.mark.parametrize(
    ("loss_class", "mini_batch_size"), [(stm.QNormRankingLoss, None), (stm.LearnableNormLoss, 3)]
)
def test_a_new_model_is_prepared_as_the_first_one(
    folder, tmp_path, caplog, loss_class, mini_batch_size
):
    """With model_init each run trains a new model, as a loss that was built for this model does."""
    models, options = [], {"max_steps": 2, "learning_rate": 0.01}

    def model_init():
        models.append(load_transformer(folder))
        return models[-1]

    loss = loss_class(model_init(), mini_batch_size=mini_batch_size)
    trainer = make_trainer(None, loss, tmp_path, 1, model_init=model_init, **options)
    stm.attach(trainer)
    trainer.train()
    trainer.train()
    alone = model_init()
    fresh = loss_class(alone, mini_batch_size=mini_batch_size)
    train(alone, fresh, tmp_path, 1, **options)
    assert not caplog.records
    for model in models[-3:-1]:
        assert model.similarity_fn_name == alone.similarity_fn_name
        assert model.state_dict().keys() == alone.state_dict().keys()
        assert all(
            torch.equal(x, alone.state_dict()[name]) for name, x in model.state_dict().items()
        )


def test_the_card_of_a_distilled_model_holds_no_embeddings(folder, tmp_path):
    model = load_transformer(folder)
    vectors = torch.randn(len(ROWS), 2, 384).tolist()
    data = Dataset.from_dict(columns() | {"label": vectors})
    train(model, stm.CosineRankingLoss(model, labels="teacher"), tmp_path, data=data, max_steps=1)
    card = (stm.export(model, tmp_path / "model") / "README.md").read_text()
    assert len(card) < 20_000  # 93,000 as sentence-transformers writes it
    assert f"<code>{data[0]['anchor']}</code>" in card
    assert str(vectors[0])[:90] in card


def test_learned_exponents_are_logged_with_the_loss(folder, tmp_path):
    loss = stm.LearnableNormLoss(load_transformer(folder), gamma_document=0.25)
    trainer = train(loss.model, loss, tmp_path, max_steps=2)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    for name in ("gamma_query", "gamma_document"):
        assert lines[-1][name] == pytest.approx(float(getattr(loss.similarity, name)))
        assert lines[0][name] != lines[-1][name]


@pytest.mark.parametrize("side", ["query", "document"])
def test_an_encoder_next_to_a_table_caches_gradients(folder, side):
    """The column of the table is one mini-batch; a model of tables alone is refused."""
    encoder = load_transformer(folder)
    tokenizer = Tokenizer.from_str(encoder.tokenizer.backend_tokenizer.to_str())
    table = StaticEmbedding(tokenizer, embedding_dim=32)
    sides = {"query": [*encoder], "document": [table]}
    if side == "document":
        sides = dict(zip(sides, reversed(sides.values()), strict=True))
    router = Router.for_query_document(sides["query"], sides["document"])
    model = SentenceTransformer(modules=[router], device="cpu").eval()
    gradients = []
    for size in (None, 2):
        pairs = zip(sides, columns(5).values(), strict=True)
        batch = [model.preprocess(texts, task=role) for role, texts in pairs]
        for role, read in zip(sides, batch, strict=True):
            read["task"] = role
        model.zero_grad()
        loss = stm.CosineRankingLoss(model, mini_batch_size=size)(batch)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients)
    tables = SentenceTransformer(modules=[Router.for_query_document([table], [table])])
    with pytest.raises(ValueError, match="neither supports nor needs"):
        stm.CosineRankingLoss(tables, mini_batch_size=2)


GOOD = Dataset.from_dict(columns())
LISTS = Dataset.from_dict(columns() | {"negatives": [["see also", "none"]] * len(ROWS)})
RANKING, MSE = stm.CosineRankingLoss, stm.SimilarityMSELoss


@pytest.mark.parametrize(
    ("loss", "data", "eval_data", "message"),
    [
        # a tokenizer reads two texts as one pair
        (MSE, LISTS, None, "'negatives' of train_dataset is a list of texts"),
        (MSE, GOOD, LISTS, "'negatives' of eval_dataset is"),
        (MSE, DatasetDict(a=GOOD, b=LISTS), None, r"of train_dataset\['b'\] is"),
        (RANKING, LISTS.to_iterable_dataset(), None, "Give each text a column of its own"),
    ],
)
def test_data_that_no_loss_can_train(model, tmp_path, loss, data, eval_data, message):
    for build in (loss, lambda m: AdaptiveLayerLoss(m, loss(m))):
        with pytest.raises(ValueError, match=message):
            train(model, build(model), tmp_path, data=data, eval_data=eval_data)


def test_a_stream_for_a_static_table(static_model, tmp_path):
    loss = stm.CosineRankingLoss(static_model)
    data = GOOD.to_iterable_dataset()
    with pytest.raises(ValueError, match=r"stream.*'dispatch_batches': False"):
        train(static_model, loss, tmp_path, data=data)
    options = {"accelerator_config": {"dispatch_batches": False}}
    train(static_model, loss, tmp_path, data=data, **options)


@pytest.mark.parametrize("options", [{"mini_batch_size": 4}, {"regularizers": [stm.SIGReg(8)]}])
def test_adaptive_layers_take_one_plain_loss(model, options):
    loss = AdaptiveLayerLoss(model, stm.CosineRankingLoss(model, **options))
    with pytest.raises(ValueError, match="AdaptiveLayerLoss takes no CosineRankingLoss"):
        loss(features(model), None)


GATHERS = {"gather_across_devices": True}


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        (({}, {}), False),
        ((GATHERS, {}), True),
        (({"regularizers": [stm.SIGReg(8)]}, {}), True),
        (({"regularizers": [stm.SIGReg(8, gather=False)]}, {}), False),
        (({"regularizers": [(stm.SIGReg(8), 0.1)]}, {"regularizers": [(stm.SIGReg(8), 1)]}), False),
        ((GATHERS, GATHERS | {"margin": -0.1, "temperature": 0.1}), False),
        ((GATHERS, GATHERS | {"same_text": "keep"}), True),
    ],
)
def test_data_sets_whose_losses_gather_differently(
    model, tmp_path, monkeypatch, options, is_refused
):
    """A process that gathers alone waits forever."""
    losses = {
        name: stm.DotRankingLoss(model, **given) for name, given in zip("ab", options, strict=True)
    }
    trainer = make_trainer(model, losses, tmp_path, data=DatasetDict(a=GOOD, b=GOOD))
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(ValueError, match="data sets a, b gather") if is_refused else nullcontext():
        stm.attach(trainer)


WAYS = {
    "plain": {"gather_across_devices": True},
    "cached": {"gather_across_devices": True, "mini_batch_size": 3},
}


def trained(folder, output):
    """Everything that a loss can learn or leave out at once, as one of several processes."""
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "ddp_backend": "gloo"}
    options |= {"learning_rate": 2e-5, "weight_decay": 0.1}
    found = {}
    for name, way in WAYS.items():
        model = load_transformer(folder)
        loss = stm.LearnableNormLoss(
            model,
            terms=temp_agg_mrl([8, 32], [0.05, 0.1]),
            margin=-0.1,
            margin_strategy="relative",
            regularizers=[(stm.SIGReg(num_directions=8), 0.01)],
            **way,
        )
        train(model, loss, output, 1, **options)
        assert isinstance(loss.model, DistributedDataParallel)
        found[name] = {name: p.detach() for name, p in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def two_ranks(folder, tmp_path_factory):
    return on_ranks(2, trained, folder, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_in_the_trainer(model, two_ranks, way):
    first, second = (results[way] for results in two_ranks)
    start = dict(model.named_parameters())
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
        assert not torch.equal(parameter, start.get(name, torch.zeros(())))
    for name in ("2.scaled_query_bias", "2.scaled_document_bias"):
        assert 512 * first[name].abs() > 1e-3  # at the rate of an encoder, 2e-5
