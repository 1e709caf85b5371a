"""Training with a trimmed vocabulary gives the weights of training without it, bit for bit; and
whatever a program does to such a model, it finds what it would find without trimming."""

import copy
import io
import itertools
import pickle
from contextlib import nullcontext
from functools import cache, partial
from tempfile import TemporaryDirectory

import pytest
import torch
from _losses import batch_of
from _ranks import needs_fork, on_ranks
from _surgery import routes
from _tiny import ROWS, columns, load_transformer, save_transformer, tokenizer
from _trainer import make_trainer
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks
from transformers import TrainerCallback
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.optimization import Adafactor

import st_magnitude as stm
from st_magnitude.surgery import vocabulary
from st_magnitude.surgery.tokens import remembered_tokens

NUM_ROWS = 2_000
TEXTS = [text for row in ROWS for text in row[:2]]
UNSEEN = ["zzz qqq", "[UNK] parameters", "jjj", ""]


def static():
    torch.manual_seed(1)
    table = StaticEmbedding(tokenizer(), torch.randn(NUM_ROWS, 32))
    return SentenceTransformer(modules=[table], device="cpu")


@cache
def folder():
    temporary = TemporaryDirectory()
    save_transformer(temporary.name, "bert")
    return temporary


def encoder():
    model = load_transformer(folder().name)
    torch.manual_seed(1)
    model[0].model.resize_token_embeddings(NUM_ROWS, mean_resizing=False)
    return model


def scaled():
    """A table of a class that multiplies what it reads, as Gemma's, with padding amid the words."""
    model = encoder()
    padding = model.tokenizer.convert_tokens_to_ids("tea")
    table = Gemma3TextScaledWordEmbedding(NUM_ROWS, 32, padding, embed_scale=3.0)
    table.weight = table_of(model).weight
    model[0].model.set_input_embeddings(table)
    return model


def two_tables():
    """Routes whose tokenizers have other ids for the same words."""
    words = {word: NUM_ROWS - 1 - i for i, word in enumerate(sorted({*" ".join(TEXTS).split()}))}
    other = Tokenizer(WordLevel({"[UNK]": 0} | words, unk_token="[UNK]"))
    other.pre_tokenizer = WhitespaceSplit()
    document = StaticEmbedding(other, static()[0].embedding.weight.detach().clone())
    return SentenceTransformer(modules=[routes([static()[0]], [document])], device="cpu")


MODELS = {"static": static, "bert": encoder}
both = pytest.mark.parametrize(
    "build", [static, pytest.param(encoder, marks=pytest.mark.slow)], ids=MODELS
)


def table_of(model):
    first = model[0]
    return getattr(first, "embedding", None) or first.model.get_input_embeddings()


def assert_same(found, expected):
    found, expected = (x.state_dict() if isinstance(x, nn.Module) else x for x in (found, expected))
    assert list(found) == list(expected)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}  # an empty text in half before 6.2
    torch.testing.assert_close(dict(found), dict(expected), **exactly)


# --- training ------------------------------------------------------------------------------------


class Shapes(TrainerCallback):
    """The number of rows that each step trained, and that its optimizer has."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        trained = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if id(weight := table_of(model).weight) in trained:
            self.rows.append(len(weight))


def trained(model, trims, output, loss=stm.CosineRankingLoss, resume=None, **options):
    """The model after training; with and without trimming the same random numbers are drawn."""
    torch.manual_seed(0)
    options = {"max_steps": 3, "callbacks": [shapes := Shapes()]} | options
    trainer = make_trainer(model, loss(model), output, **options)
    start, weight = table_of(model).weight.detach().clone(), table_of(model).weight
    with stm.trimmed_vocabulary(trainer) if trims else nullcontext():
        trainer.train(resume_from_checkpoint=resume)
        read = model.encode(UNSEEN + TEXTS)
    assert (read == model.encode(UNSEEN + TEXTS)).all()
    assert bool(shapes.rows) == weight.requires_grad
    if shapes.rows:
        assert all((rows < NUM_ROWS / 10) == trims for rows in shapes.rows)
        assert 50 < (weight != start).any(dim=1).sum() < NUM_ROWS / 10
    assert table_of(model).weight is weight
    return model


OPTIONS = {
    "AdamW": {"optim": "adamw_torch", "learning_rate": 0.1},
    "SGD with momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5},
    "clipping": {"max_grad_norm": 1e-3, "optim": "sgd", "learning_rate": 100.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bfloat16": {"bf16": True},
    "prompts": {"prompts": {"anchor": "jjj zzz: ", "positive": "[qqq] "}},
    "several data sets": {
        "data": DatasetDict(a=Dataset.from_dict(columns()), b=Dataset.from_dict(columns(9, 1)))
    },
}


@both
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_weights_are_those_of_a_whole_table(tmp_path, build, options):
    models = [trained(build(), trims, tmp_path, **options) for trims in (True, False)]
    assert_same(*models)


def test_gradcache(tmp_path):
    """And padding without a gradient."""
    loss = partial(stm.LearnableNormLoss, mini_batch_size=3)
    assert_same(*(trained(scaled(), trims, tmp_path, loss) for trims in (True, False)))


@both
def test_a_run_continues_with_and_without_trimming(tmp_path, build):
    """A checkpoint holds the whole table and the whole state, and knows nothing of ours."""
    whole = trained(build(), False, tmp_path / "whole", max_steps=4)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    states = []
    for first, second in itertools.product((True, False), repeat=2):
        output = tmp_path / f"{first}{second}"
        trained(build(), first, output, **options)
        states.append(torch.load(output / "checkpoint-2" / "optimizer.pt")["state"])
        assert {len(x["exp_avg"]) for x in states[-1].values()} >= {NUM_ROWS}
        model = trained(build(), second, output, resume=f"{output}/checkpoint-2", **options)
        assert_same(model, whole)
        assert_same(SentenceTransformer(f"{output}/checkpoint-4", device="cpu"), whole)
    for state in states[1:]:
        for number, values in states[0].items():
            assert_same(values, state[number])


def test_a_frozen_table_under_lora(tmp_path):
    pytest.importorskip("peft")
    models = []
    for trims in (True, False):
        model = encoder()
        torch.manual_seed(2)
        stm.surgery.adapters.add_lora(model, 4)
        models.append(trained(model, trims, tmp_path))
    assert_same(*models)


def on_a_rank(output):
    """The state of a rank after two trainings, of which the second begins anew."""
    found = []
    for trims in (True, False):
        for build in MODELS.values():
            model = build()
            loss = stm.CosineRankingLoss(model, gather_across_devices=True)
            options = {"max_steps": 3, "per_device_train_batch_size": 4, "ddp_backend": "gloo"}
            trainer = make_trainer(model, loss, output, **options)
            with stm.trimmed_vocabulary(trainer) if trims else nullcontext():
                trainer.train()
            trainer.optimizer = None
            trainer.train()
            found.append(model.state_dict())
    return found


@pytest.mark.slow
@needs_fork
def test_two_ranks(tmp_path):
    folder()  # which both ranks then read
    first, second = on_ranks(2, on_a_rank, tmp_path)
    for mine, other in zip(first, second, strict=True):
        assert_same(mine, other)
    for trimmed, whole in zip(first[:2], first[2:], strict=True):
        assert_same(trimmed, whole)


def of_a_rank():
    """The rows that one of two ranks trains, each of which has read other texts."""
    rank = torch.distributed.get_rank()
    model = static()
    with stm.trimmed_vocabulary(model, ["tea", "rain"][rank : rank + 1]):
        return len(table_of(model).weight)


@needs_fork
def test_ranks_train_the_same_rows():
    assert on_ranks(2, of_a_rank) == [2, 2]


# --- a model within the block ---------------------------------------------------------------------


MODELS_TO_READ = [static, encoder, scaled, two_tables]


@pytest.mark.parametrize("build", MODELS_TO_READ)
def test_a_model_reads_and_saves_as_before(tmp_path, build):
    plain, model = build(), build()
    with stm.trimmed_vocabulary(model, TEXTS):
        assert sum(x.numel() for x in model.parameters()) < sum(
            x.numel() for x in plain.parameters()
        )
        for found in (model, copy.deepcopy(model)):
            assert_same(found, plain)
            for texts, route in itertools.product((TEXTS, UNSEEN), ("query", "document")):
                embeddings, expected = (
                    x.encode(texts, task=route, convert_to_tensor=True) for x in (found, plain)
                )
                assert torch.equal(embeddings, expected)
        model.save_pretrained(str(tmp_path))
        other = copy.deepcopy(plain)
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(1)
        model.load_state_dict(copy.deepcopy(plain).state_dict(), assign=True)
        assert_same(model, plain)
        model.load_state_dict(other.state_dict())
        assert_same(model, other)
    assert_same(model, other)
    assert_same(SentenceTransformer(str(tmp_path), device="cpu"), plain)


@both
def test_a_token_without_a_row(tmp_path, build):
    model = build()
    loss = stm.CosineRankingLoss(model)
    with stm.trimmed_vocabulary(model, TEXTS):
        for train in (True, False):
            model.train(train)
            with pytest.raises(ValueError, match=r"The token \d+ of a training batch"):
                loss(batch_of(model, [("jjj", "zzz")]), None)
    trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path, max_steps=1)
    preprocess = model.preprocess

    def preprocess_at_random(texts, **options):
        return preprocess(["qqq"] * 8 if len(texts) == 8 else texts, **options)

    trainer.data_collator.preprocess_fn = preprocess_at_random
    with stm.trimmed_vocabulary(trainer), pytest.raises(ValueError, match="The token"):
        trainer.train()
    with stm.trimmed_vocabulary(trainer, ["qqq"]):
        trainer.train()


def test_padding_has_a_row_where_no_text_is_padded():
    model = scaled()
    padding = table_of(model).padding_idx
    with stm.trimmed_vocabulary(model, ["rain", "snow"]):
        assert table_of(model).padding_idx != padding
        model(model.preprocess(["rain", "snow rain"]))["sentence_embedding"].sum().backward()
    assert table_of(model).padding_idx == padding


@pytest.mark.parametrize("keeps", [True, False])
def test_a_trainer_trains_again(tmp_path, keeps):
    """With the same optimizer or a new one, in another block or without one."""
    found = []
    for trims in itertools.product((True, False), repeat=2):
        model = static()
        trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path)
        for is_trimmed in trims:
            trainer.optimizer = trainer.optimizer if keeps else None
            with stm.trimmed_vocabulary(trainer) if is_trimmed else nullcontext():
                trainer.train()
        found.append(model)
    for model in found[1:]:
        assert_same(model, found[0])


def test_a_model_without_texts():
    with pytest.raises(ValueError, match="pass them, or pass the Trainer"):
        stm.trimmed_vocabulary(static()).__enter__()


def test_a_block_in_a_block_changes_nothing(caplog):
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        weight = table_of(model).weight
        with stm.trimmed_vocabulary(model, ["tea"]):
            assert table_of(model).weight is weight
        assert table_of(model).weight is weight
    assert "an outer block has trimmed it" in caplog.text


def tie(trainer):
    trainer.loss.head = nn.Linear(32, NUM_ROWS, bias=False)
    trainer.loss.head.weight = table_of(trainer.model).weight


def stream(trainer):
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()


WHOLE = {
    "tied to other weights": tie,
    "sparse gradients": lambda trainer: setattr(table_of(trainer.model), "sparse", True),
    "limit of norms": lambda trainer: setattr(table_of(trainer.model), "max_norm", 1.0),
    "bag with padding": lambda trainer: setattr(table_of(trainer.model), "padding_idx", 0),
    "a stream": stream,
    "on 2 GPUs": lambda trainer: setattr(trainer.args, "_n_gpu", 2),
    "FSDP divides": lambda trainer: setattr(trainer, "is_fsdp_enabled", True),
    "model_init makes another": lambda trainer: setattr(trainer, "model_init", static),
    "Adafactor has no number": lambda trainer: setattr(trainer.args, "optim", "adafactor"),
}


@pytest.mark.parametrize("message", WHOLE)
def test_what_is_left_whole(tmp_path, caplog, message):
    model = static()
    weight = table_of(model).weight
    trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path)
    WHOLE[message](trainer)
    with stm.trimmed_vocabulary(trainer):
        assert table_of(model).weight is weight
    assert message in caplog.text


def test_a_table_of_few_other_rows_is_left_whole(caplog, monkeypatch):
    caplog.set_level("INFO", "st_magnitude")
    model = static()
    monkeypatch.setattr(vocabulary, "LEAST_SHARE", 0.97)
    with stm.trimmed_vocabulary(model, TEXTS):
        assert len(table_of(model).weight) == NUM_ROWS
    assert "120 of 2,000 rows of the word table are used, and all are trained." in caplog.text


PAIRS = [row[:2] for row in ROWS]


def optimizer_of(model, kind=torch.optim.AdamW, **options):
    return kind(model.parameters(), **{"lr": 0.1, "weight_decay": 0} | options)


def step(model, optimizer, rows=PAIRS):
    loss = stm.CosineRankingLoss(model)(batch_of(model, rows), None)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def average(target, source):
    for mine, other in zip(target, source, strict=True):
        mine.copy_(mine * 0.75 + other * 0.25)


# --- programs: each takes a model and a block, and returns models and tensors ---------------------


def cast(how):
    def program(model, block):
        with block:
            step(model, optimizer_of(model))
            how(model)
            yield model.state_dict()
            yield model.encode(UNSEEN + TEXTS, convert_to_tensor=True)

    return program


def written_state_dict(model, block):
    """Which is live: it follows each step, and what is written into it is trained on."""
    start = copy.deepcopy(model).state_dict()
    with block:
        optimizer = optimizer_of(model)
        held = model.state_dict()
        step(model, optimizer)
        yield {name: x.clone() for name, x in held.items()}
        with torch.inference_mode():
            average(held.values(), start.values())
        step(model, optimizer)
        average(held.values(), start.values())
        yield model.encode(UNSEEN + TEXTS, convert_to_tensor=True)
        step(model, optimizer)
        average(held.values(), start.values())
        yield copy.deepcopy(model)
        yield pickle.loads(pickle.dumps(model))


def written_between_gradient_and_step(model, block):
    with block:
        optimizer = optimizer_of(model)
        stm.CosineRankingLoss(model)(batch_of(model, PAIRS), None).backward()
        for value in model.state_dict().values():
            value.mul_(0.5)
        optimizer.step()


def pickles(model, block):
    with block:
        step(model, optimizer_of(model))
        stored = io.BytesIO()
        torch.save(model, stored)
        found = [
            pickle.loads(pickle.dumps(model)),
            torch.load(io.BytesIO(stored.getvalue()), weights_only=False),
        ]
        step(model, optimizer_of(model))
    for loaded in found:
        assert type(table_of(loaded)) is type(table_of(model))
        step(loaded, optimizer_of(loaded), [("zzz", "qqq"), ("jjj", "kkk")])
        yield loaded


def copies(model, block):
    """Are trained as the model is, in the block and after it."""
    with block:
        step(model, optimizer_of(model))
        copied = copy.deepcopy(model)
        optimizer = optimizer_of(copied)
        step(copied, optimizer)
        again = copy.deepcopy(copied)
    step(copied, optimizer, [("zzz", "qqq"), ("jjj", "kkk")])
    yield copied
    yield again


def lives_on(kind, **options):
    def program(model, block):
        optimizer = optimizer_of(model, kind, **options)
        kept = step(model, optimizer)  # whose graph ends in the weight as it was
        with block:
            step(model, optimizer)
            yield copy.deepcopy(optimizer.state_dict()["state"][0])
        assert kept.grad_fn is not None
        yield copy.deepcopy(optimizer.state_dict()["state"][0])
        step(model, optimizer)
        yield copy.deepcopy(optimizer.state_dict()["state"][0])

    return program


def first_stepped_after(model, block):
    with block:
        optimizer = optimizer_of(model)
    step(model, optimizer)


PROGRAMS = {
    "bfloat16": cast(lambda model: model.bfloat16()),
    "to": cast(lambda model: model.to(torch.float64).to(torch.float32)),
    "written": written_state_dict,
    "written before a step": written_between_gradient_and_step,
    "pickles": pickles,
    "copies": copies,
    "AdamW lives on": lives_on(torch.optim.AdamW),
    "SGD lives on": lives_on(torch.optim.SGD, momentum=0.9),
    "RMSprop lives on": lives_on(torch.optim.RMSprop, centered=True),
    "stepped after": first_stepped_after,
}


@both
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_finds_what_it_would_find_without_trimming(tmp_path, monkeypatch, build, program):
    monkeypatch.chdir(tmp_path)
    found = []
    for trims in (True, False):
        model = build()
        weight = table_of(model).weight
        block = stm.trimmed_vocabulary(model, TEXTS) if trims else nullcontext()
        results = list(program(model, block) or [])
        assert table_of(model).weight is weight
        assert len(weight) == NUM_ROWS
        found.append([*results, model])
    for mine, other in zip(*found, strict=True):
        if isinstance(mine, nn.Module):
            assert [x.shape for x in mine.parameters()] == [x.shape for x in other.parameters()]
        if torch.is_tensor(mine):
            mine, other = {"": mine}, {"": other}
        assert_same(mine, other)


# --- what differs ---------------------------------------------------------------------------------


def test_the_device_of_the_whole_table():
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        model.to("meta")
    assert table_of(model).weight.is_meta
    assert len(table_of(model).weight) == NUM_ROWS


def test_a_table_that_is_frozen_in_the_block_stays_frozen():
    model = static()
    with stm.trimmed_vocabulary(model, TEXTS):
        model.requires_grad_(False)
    assert not table_of(model).weight.requires_grad


def test_no_gradient_crosses_the_block():
    model = static()
    weight = table_of(model).weight
    loss = stm.CosineRankingLoss(model)
    loss(batch_of(model, PAIRS), None).backward()
    with stm.trimmed_vocabulary(model, TEXTS):
        assert weight.grad is None
        loss(batch_of(model, PAIRS), None).backward()
        assert len(weight.grad) == len(weight) < NUM_ROWS
    assert weight.grad is None


def test_an_interrupt_while_the_second_table_is_set_up(monkeypatch):
    """And an error at the end of the block: everything is as it was."""
    model = two_tables()
    tables = [part for part in model.modules() if isinstance(part, nn.EmbeddingBag)]
    before = [dict(vars(table)) for table in tables]
    rows_to_train, calls = vocabulary._rows_to_train, []

    def interrupt(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rows_to_train(*args)

    hooks = dict(optimizer_hooks)
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "_rows_to_train", interrupt)
        with pytest.raises(KeyboardInterrupt), stm.trimmed_vocabulary(model, TEXTS):
            raise AssertionError
    with pytest.raises(IndexError), stm.trimmed_vocabulary(model, TEXTS):
        tables[0].weight.data = torch.zeros(3)
    assert [dict(vars(table)) for table in tables] == before
    assert all(type(table) is nn.EmbeddingBag for table in tables)
    assert [len(table.weight) for table in tables] == [NUM_ROWS] * 2
    assert dict(optimizer_hooks) == hooks


@pytest.mark.parametrize("option", ["weight_decay", "lambd"])
def test_what_shrinks_all_rows_is_said(caplog, option):
    model = static()
    kind = torch.optim.ASGD if option == "lambd" else torch.optim.AdamW
    with stm.trimmed_vocabulary(model, TEXTS):
        optimizer = optimizer_of(model, kind, **{option: 0.1})
        step(model, optimizer)
        step(model, optimizer)
    assert caplog.text.count(f"{option} does not shrink the 1,880 rows") == 1


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_state_that_is_not_one_number_a_weight(where):
    """Adafactor's, in a step, in its checkpoint, and in one from outside."""
    model = static()
    weights = model.parameters()
    optimizer = Adafactor(weights, lr=0.1, relative_step=False, scale_parameter=False)

    def train_where():
        if where == "before":
            step(model, optimizer)
        with stm.trimmed_vocabulary(model, TEXTS):
            step(model, optimizer)
            if where == "in":
                optimizer.state_dict()
        step(model, optimizer)

    with pytest.raises(ValueError, match="one number for a row of the word table, as Adafactor's"):
        train_where()
    assert len(table_of(model).weight) == NUM_ROWS


# --- a static table tokenizes a text once, and its tokenizer does all else as before --------------


class Counts:
    def __init__(self, tokenizer):
        self.tokenizer, self.read = tokenizer, []

    def encode_batch(self, texts, **options):
        self.read += texts
        return self.tokenizer.encode_batch(texts, **options)


def test_a_text_is_tokenized_once(tmp_path):
    """Whatever is copied; then the tokenizer is the model's own again."""
    model = static()
    model[0].tokenizer = counts = Counts(model[0].tokenizer)
    trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path)
    counts.read.clear()  # examples of the card
    with stm.trimmed_vocabulary(trainer):
        trainer.train()
        copy.deepcopy(model).encode(TEXTS)
        assert sorted(counts.read) == sorted(set(TEXTS))
        model[0].tokenizer.encode_batch(TEXTS, add_special_tokens=True)
        assert len(counts.read) == len(set(TEXTS)) + len(TEXTS)
    assert model[0].tokenizer is counts


def test_the_tokenizer_does_all_else():
    model = static()
    own = model[0].tokenizer
    with remembered_tokens(model):
        remembering = model[0].tokenizer
        model.encode(TEXTS)
        words = [text.split() for text in TEXTS]
        for texts, args, options in [
            (TEXTS, (), {}),
            (TEXTS, (False,), {}),
            (words, (True,), {}),
            (TEXTS, (), {"add_special_tokens": False}),
            (words, (), {"is_pretokenized": True, "add_special_tokens": False}),
        ]:
            found, expected = (x.encode_batch(texts, *args, **options) for x in (remembering, own))
            for mine, other in zip(found, expected, strict=True):
                assert list(mine.ids) == other.ids
                assert mine.tokens == other.tokens
                assert mine.attention_mask == other.attention_mask
        pickled = pickle.loads(pickle.dumps(remembering))
    assert type(pickled) is Tokenizer
    assert pickled.to_str() == own.to_str()
