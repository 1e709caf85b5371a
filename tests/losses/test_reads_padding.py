"""Encoders that read padding, features that have no rows, and the switch: all as upstream."""

import copy
import random

import numpy as np
import pytest
import torch
from _losses import batch_of, gradients
from _tiny import ROWS, load_transformer, save_transformer, tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn
from transformers import AutoConfig, AutoModel

import st_magnitude as stm
from st_magnitude.losses import groups, probe

TEXTS = [row[:3] for row in ROWS[:6]]
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "max_position_embeddings": 128}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"n_positions": 128, "n_embd": 32, "n_layer": 2}
FNET = {name: x for name, x in BERT.items() if name != "num_attention_heads"}
REFORMER = {"hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
REFORMER |= {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 8), "is_decoder": False}
REFORMER |= {"max_position_embeddings": 32, "attn_layers": ["local", "local"]}
REFORMER |= {"local_attn_chunk_length": 8, "feed_forward_size": 64}
REFORMER |= {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
READERS = {
    "fnet": (FNET | {"hidden_dropout_prob": 0.0, "initializer_range": 0.2}, "right"),
    "yoso": (BERT | STILL, "right"),
    "convbert": (BERT | STILL, "right"),
    "mobilebert": (BERT | STILL | {"embedding_size": 32, "intra_bottleneck_size": 32}, "right"),
    "reformer": (REFORMER, "right"),
    "ctrl": (GPT | {"dff": 64, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "left"),
    "gpt2": (GPT | {"n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "left"),
}
OTHERS = {
    "bert": (BERT | STILL, "right"),
    "roberta": (BERT | STILL, "left"),  # whose places do not count the padding of the reader
    "llama": (BERT | {"num_key_value_heads": 1}, "left"),
    "xlnet": ({"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "dropout": 0.0}, "left"),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "right"),
}


def encoder(folder, family):
    """A random model whose texts are padded to 32 tokens."""
    options, side = (READERS | OTHERS)[family]
    tokens = tokenizer()
    config = AutoConfig.for_model(
        family, vocab_size=len(tokens), pad_token_id=tokens.pad_token_id, **options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config)
        if family == "mobilebert":
            torch.nn.init.normal_(model.embeddings.word_embeddings.weight)  # the padding's row, too
    model.save_pretrained(str(folder))
    tokens.save_pretrained(str(folder))
    fixed = {"text": {"padding": "max_length", "max_length": 32}}
    transformer = Transformer(str(folder), processing_kwargs=fixed)
    transformer.tokenizer.padding_side = side
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[transformer, pooling], device="cpu").train()


def ours_and_theirs(model, columns):
    """The values of two losses that are one formula, in double precision where models have it."""
    ours = stm.CosineRankingLoss(model, same_text="keep")
    theirs = MultipleNegativesRankingLoss(model)
    values = []
    for loss in (ours, theirs):
        torch.manual_seed(1)  # which some draw from, even without dropout
        values.append(loss([dict(x) for x in columns], None).item())
    return values


@pytest.mark.parametrize("family", [*READERS, *OTHERS])
def test_one_measurement_tells_who_reads_padding(tmp_path, family, caplog):
    model = encoder(tmp_path, family)
    columns = batch_of(model, TEXTS)
    ours, theirs = ours_and_theirs(model, columns)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert probe.traits_of(model).reads_padding == (family in READERS)
    assert ("change with the padding" in caplog.text) == (family in READERS)
    assert caplog.text.count("are not grouped") == (family in READERS)


def test_the_measurement_leaves_no_trace(tmp_path):
    """In random numbers, in modules, in what a monitor hears, and in compiled code."""
    compiled, shapes = [], []
    torch._dynamo.reset()
    model = load_transformer(save_transformer(tmp_path, "bert", hidden_dropout_prob=0.3)).train()
    model[0].auto_model.encoder.layer[1].eval()  # which the user wants to be still
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.register_forward_hook(lambda *_: shapes.append(1))
    model[0].compile(backend=lambda graph, _: compiled.append(1) or graph.forward)
    loss = stm.CosineRankingLoss(model)
    columns = batch_of(model, TEXTS)
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    groups.sorted_by_length(columns, loss.model, 2)  # which measures, and embeds nothing
    assert probe.traits_of(model).reads_padding is False
    assert not shapes
    assert not compiled
    assert modes == [module.training for module in model.modules()]
    assert not gradients(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_model_may_refuse_lengths_in_training_only(folder):
    model = load_transformer(folder).eval()

    def check(module, given):
        if module.training and given[0]["input_ids"].shape[1] % 4:
            raise ValueError("not a multiple of 4")

    model[0].register_forward_pre_hook(check)
    texts = [("why is the sky blue", "see also the light of a short wave that is a tree")] * 2
    stm.CosineRankingLoss(model).embed(batch_of(model, texts))
    assert probe.traits_of(model).reads_padding


def test_rounding_is_no_reading(folder):
    """In bfloat16, by weights or by the autocast that a Trainer puts around the model."""
    for half in ("weights", "autocast"):
        model = load_transformer(folder)
        if half == "weights":
            model.bfloat16()
        else:
            forward = model.forward
            model.forward = torch.autocast("cpu", torch.bfloat16)(forward)
        stm.CosineRankingLoss(model).embed(batch_of(model, TEXTS))
        assert probe.traits_of(model).reads_padding is False


def test_it_is_measured_where_a_text_has_padding(folder):
    """Texts of one length teach nothing, and are grouped without padding."""
    model = load_transformer(folder)
    loss = stm.CosineRankingLoss(model)
    loss.embed(batch_of(model, [("lima", "none"), ("none", "notes")]))
    assert probe.traits_of(model).reads_padding is None
    loss.embed(batch_of(model, [("lima", "none"), ("none", "see below")]))
    assert probe.traits_of(model).reads_padding is False


WEIGHTS = [0.3 * i for i in range(1, 1 + len(TEXTS))]
BY_TEXT = {
    "list": WEIGHTS,
    "array": np.array(WEIGHTS),
    "dict of tensors": {"weights": torch.tensor(WEIGHTS)},
    "tensor": torch.tensor(WEIGHTS),
    "one number": 0.5,
}


class Weighs(nn.Module):
    """Multiplies an embedding (n, D) with a feature of its text, in some of its dimensions."""

    def forward(self, features):
        if "note" in features:
            x, note = features["sentence_embedding"], features["note"]
            note = note["weights"] if isinstance(note, dict) else note
            rows = note if isinstance(note, float) else torch.tensor([float(y) for y in note])
            half = x.shape[1] // 2
            scaled = x[:, :half] * torch.as_tensor(rows).reshape(-1, 1)
            features["sentence_embedding"] = torch.cat([scaled, x[:, half:]], dim=1)
        return features


@pytest.mark.parametrize("kind", BY_TEXT)
def test_features_of_each_text(folder, kind):
    model = load_transformer(folder)
    model.append(Weighs())
    columns = batch_of(model, TEXTS)
    columns[1]["note"] = BY_TEXT[kind]
    ours, theirs = ours_and_theirs(model, columns)
    assert ours == pytest.approx(theirs, rel=1e-5)
    sorted_columns, _ = groups.sorted_by_length(columns, model, 2)
    assert (sorted_columns[1] is columns[1]) == (kind != "one number")


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32]


@pytest.mark.parametrize("columns_with_it", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_of_each_dtype(folder, dtype, columns_with_it):
    """A mask with fractions has the weights of mean pooling, as IDF and SIF give them."""
    model = load_transformer(folder)
    columns = batch_of(model, TEXTS)
    for i in columns_with_it:
        mask = columns[i]["attention_mask"]
        weights = 1 / (2 + torch.arange(mask.shape[1])) if dtype.is_floating_point else 1
        columns[i]["attention_mask"] = (mask * weights).to(dtype)
    ours, theirs = ours_and_theirs(model, columns)
    assert ours == pytest.approx(theirs, rel=1e-5)


# --- the switch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mini_batch_size", [None, 3])
def test_without_groups_a_step_has_upstreams_passes(folder, mini_batch_size):
    model = load_transformer(folder)
    options = {} if mini_batch_size is None else {"mini_batch_size": mini_batch_size}
    upstream = MultipleNegativesRankingLoss if not options else CachedMultipleNegativesRankingLoss
    losses = [
        upstream(model, **options),
        stm.CosineRankingLoss(model, same_text="keep", group_by_length=False, **options),
        stm.SimilarityMSELoss(model, group_by_length=False),
    ]
    seen, shapes = [], []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]["input_ids"].tolist()))
    for loss in losses:
        columns = batch_of(model, TEXTS)
        is_ranking = len(shapes) < 2
        loss(
            columns if is_ranking else columns[:2], None if is_ranking else torch.ones(6)
        ).backward()
        shapes.append(seen.copy())
        seen.clear()
        assert "group_by_length" in stm.CosineRankingLoss(model).get_config_dict()
    assert shapes[0] == shapes[1]
    assert shapes[2] == [x["input_ids"].tolist() for x in columns[:2]]
    with pytest.raises(ValueError, match="group_by_length must be one of False and True"):
        stm.CosineRankingLoss(model, group_by_length="no")
