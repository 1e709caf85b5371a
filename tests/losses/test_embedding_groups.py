"""A batch in groups of like length: embeddings and gradients of one pass a column, in float64."""

import pytest
import torch
from _losses import batch_of, gradients
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, decoder, load_transformer, save_transformer, tokenizer
from _trainer import train
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.losses import probe

# of any length, with copies in a column and across columns
TEXTS = [(*row[:3], *row[:1]) for row in ROWS[:6]] + [(*ROWS[0][:2], ROWS[1][2], "lima")] * 2
SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 60}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "bert": STILL,
    "distilbert": {},
    "roberta": SIZES | STILL,
    "mpnet": SIZES | STILL,
    "modernbert": SIZES | {"global_attn_every_n_layers": 2, "local_attention": 8},
}
POOLINGS = ["cls", "max", "weightedmean", "lasttoken"]


@pytest.fixture(autouse=True)
def passes_are_cheap(monkeypatch):
    """As many passes as there are lengths."""
    monkeypatch.setattr(probe.Traits, "overhead", lambda *_: 0)


def of_decoder(folder, family, side):
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = decoder(family, **still)
    model.base_model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    transformer = Transformer(str(folder))
    transformer.tokenizer.padding_side = side
    pooling = Pooling(transformer.get_embedding_dimension(), "lasttoken")
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def seen(model):
    """The shapes (n, L) of the token ids of each pass from now on."""
    shapes = []
    model.register_forward_pre_hook(
        lambda _, given: shapes.append(tuple(given[0]["input_ids"].shape))
    )
    return shapes


def assert_as_one_pass_a_column(model, columns, rtol=1e-9):
    """Returns the shapes of the passes of the loss."""
    model.double().train()
    loss = stm.CosineRankingLoss(model)
    separate = [model(dict(x))["sentence_embedding"] for x in columns]
    weights = [torch.randn_like(x) for x in separate]
    sum((x * w).sum() for x, w in zip(separate, weights, strict=True)).backward()
    expected = gradients(model)
    model.zero_grad()
    shapes = seen(model)
    found = loss.embed([dict(x) for x in columns])
    sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    torch.testing.assert_close(found, separate, rtol=rtol, atol=rtol)
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() <= rtol * expected[name].norm() + 1e-12
    return shapes


def assert_grouped(shapes, columns):
    lengths = [sorted(x["attention_mask"].sum(dim=1).tolist()) for x in columns]
    assert len(shapes) > len(columns)
    texts = {(i, tuple(row)) for i, x in enumerate(columns) for row in x["input_ids"].tolist()}
    assert sum(n for n, _ in shapes) == len(texts) < sum(map(len, lengths))
    assert {length for _, length in shapes} == {y for x in lengths for y in x}


@pytest.mark.parametrize(
    ("name", "pooling"),
    [*((name, "mean") for name in ENCODERS), *(("distilbert", x) for x in POOLINGS)],
)
def test_encoders_and_poolings(tmp_path, name, pooling):
    model = load_transformer(save_transformer(tmp_path, name, **ENCODERS[name]), pooling)
    columns = batch_of(model, TEXTS)
    rtol = 1e-5 if name == "modernbert" else 1e-9  # which turns queries and keys in float32
    assert_grouped(assert_as_one_pass_a_column(model, columns, rtol), columns)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "is_relative"), [("llama", True), ("gpt2", False)])
def test_decoders(tmp_path, family, is_relative, side):
    """Texts that are padded on the left are cut there, unless their places count the padding."""
    model = of_decoder(tmp_path, family, side)
    columns = batch_of(model, TEXTS)
    shapes = assert_as_one_pass_a_column(model, columns, 1e-5 if is_relative else 1e-9)
    if side == "right" or is_relative:
        assert_grouped(shapes, columns)
    else:
        assert shapes == [(8, 6), (24, 11)]


def test_places_that_count_from_the_first_token_on_the_left(tmp_path):
    """Columns are padded to one width with the padding of their reader, not with zeros."""
    model = load_transformer(save_transformer(tmp_path, "roberta", **ENCODERS["roberta"]))
    model[0].auto_model.embeddings.padding_idx = 3  # RoBERTa has 1, but not 0
    model.tokenizer.pad_token = model.tokenizer.convert_ids_to_tokens(3)
    model.tokenizer.padding_side = "left"
    columns = batch_of(model, TEXTS)
    assert_grouped(assert_as_one_pass_a_column(model, columns), columns)


def test_prompts_that_pooling_leaves_out(folder):
    model = load_transformer(folder)
    model[1].include_prompt = False
    prompts = ["how do: ", None, "see also: ", "how do: "]
    texts = zip(*TEXTS, strict=True)
    columns = [
        dict(model.preprocess(list(column), prompt=prompt))
        for column, prompt in zip(texts, prompts, strict=True)
    ]
    columns[3]["prompt_length"] = torch.tensor([columns[3]["prompt_length"]])  # has its own pass
    assert_as_one_pass_a_column(model, columns)


def test_routes_lora_and_checkpointing(folder):
    routes = {task: [load_transformer(folder)[0]] for task in ("query", "document")}
    model = load_transformer(folder)
    model[0] = Router(routes, default_route="document")
    columns = batch_of(model, TEXTS)
    for column, task in zip(columns, ["query", "document", "document", "query"], strict=True):
        column["task"] = task
    assert_as_one_pass_a_column(model, columns)
    model = load_transformer(folder)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_lin"], lora_dropout=0.0))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    columns = batch_of(model, TEXTS)
    assert_as_one_pass_a_column(model, columns)


def test_columns_that_stay_as_they_are(folder):
    """Masks with holes, features that nobody knows, and a model with a BatchNorm."""
    model = load_transformer(folder)
    columns = batch_of(model, TEXTS)
    columns[1]["attention_mask"][0, 1] = 0
    for column in columns[1:]:
        column["note"] = "alike"
    columns[3]["others"] = torch.zeros(len(TEXTS), 5)
    shapes = assert_as_one_pass_a_column(model, columns)
    as_they_are = [tuple(x["input_ids"].shape) for x in columns[1:]]
    assert all(shape in shapes for shape in as_they_are)
    model = load_transformer(folder)
    model.append(nn.Module())
    model[2].norm = nn.BatchNorm1d(32)
    model[2].forward = lambda x: x | {"sentence_embedding": model[2].norm(x["sentence_embedding"])}
    columns = batch_of(model, [row[:2] for row in TEXTS])
    shapes = assert_as_one_pass_a_column(model, columns)
    assert shapes == [tuple(x["input_ids"].shape) for x in columns]


def test_copies_share_a_dropout_mask_within_a_column_only(tmp_path):
    """As SimCSE needs it, whose documents are its queries."""
    model = load_transformer(save_transformer(tmp_path, "bert", hidden_dropout_prob=0.3)).train()
    batch = batch_of(model, [("a prime", "a prime"), ("a prime", "a prime"), ("lima", "lima")])
    queries, documents = stm.CosineRankingLoss(model).embed(batch)
    assert torch.equal(queries[0], queries[1])
    assert torch.equal(documents[0], documents[1])
    assert not torch.isclose(queries, documents).all(dim=1).any()


@pytest.mark.parametrize("mini_batch_size", [None, 4], ids=["plain", "cached"])
def test_three_steps_end_at_the_weights_of_sentence_transformers(folder, tmp_path, mini_batch_size):
    weights, shapes = {}, {}
    for name in ("theirs", "ours"):
        model = load_transformer(folder)
        shapes[name] = seen(model)
        ours = stm.CosineRankingLoss(model, same_text="keep", mini_batch_size=mini_batch_size)
        loss = MultipleNegativesRankingLoss(model) if name == "theirs" else ours
        # SGD, because AdamW's first steps magnify rounding where a gradient is about 0
        options = {
            "max_steps": 3,
            "optim": "sgd",
            "per_device_train_batch_size": 8,
            "num_negatives": 2,
        }
        train(model, loss, tmp_path / name, **options)
        weights[name] = torch.cat([x.detach().flatten() for x in model.parameters()])
    assert (weights["ours"] - weights["theirs"]).norm() < 1e-5 * weights["theirs"].norm()
    ours, theirs = (sum(n * length for n, length in shapes[x]) for x in ("ours", "theirs"))
    assert ours / (1 if mini_batch_size is None else 2) < 0.8 * theirs


def on_rank(folder, cached):
    """Passes, loss and gradients of rows with one length on rank 0 and many on the other."""
    model = load_transformer(folder).double()
    loss = stm.CosineRankingLoss(
        model, mini_batch_size=3 if cached else None, gather_across_devices=True
    )
    model.register_buffer("synchronised", torch.zeros(1))  # in each pass of DDP
    shapes = seen(model)
    loss.model = DistributedDataParallel(model)
    rows = RANKS[dist.get_rank()]
    value = loss(batch_of(model, rows))
    value.backward()
    assert probe.traits_of(model).reads_padding is False  # also where no text has padding
    return len(shapes), value.item(), gradients(model)


RANKS = [[("lima", "lima")] * 8, [row[:2] for row in ROWS[:8]]]


@needs_fork
@pytest.mark.parametrize("cached", [False, True])
def test_ranks_make_equally_many_passes(folder, cached):
    (few, loss, mine), (many, other, theirs) = on_ranks(2, on_rank, folder, cached)
    assert few == many > 2
    torch.testing.assert_close(mine, theirs)
    model = load_transformer(folder).double()
    alone = stm.CosineRankingLoss(model)(batch_of(model, RANKS[0] + RANKS[1]))
    alone.backward()
    assert (loss + other) / 2 == pytest.approx(alone.item(), rel=1e-9)
    torch.testing.assert_close(mine, gradients(model), rtol=1e-8, atol=1e-10)
