"""Prompts and routes: training and priors read texts as encode_query does."""

import pytest
import torch
from _lookup import tokenizer_of
from _tiny import ROWS, columns, language_model, load_transformer, tokenizer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.modules import ExponentNorm
from st_magnitude.workbench.finetune.train import TrainConfig
from st_magnitude.workbench.finetune.trainer import make_rows, make_trainer

PROMPTS = {"query": "what is tea ", "document": "see the notes "}
OTHER = {"query": "where do ", "document": "returns a "}
CHAT = "{% for x in messages %}[CLS] {{ x['role'] }} {{ x['content'] }} [SEP]{% endfor %} notes"
DATA = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, {query: {"d19"} for query in QUERIES})


def words() -> Tokenizer:
    """A tokenizer with other numbers than those of `tokenizer`."""
    names = sorted({word for row in ROWS for text in row for word in text.split()}, reverse=True)
    return tokenizer_of(names)


def static(tokens=None):
    return StaticEmbedding(tokens or tokenizer(), embedding_dim=16)


def make(folder, kind, prompts=None):
    """A model whose texts depend on their prompts or their routes."""
    if kind == "router":
        modules = [Router.for_query_document([static(words())], [static()])]
    elif kind == "exponents":
        modules = [*load_transformer(folder), ExponentNorm(0.8, 0.3)]
    elif kind == "chat":
        transformer = Transformer(folder, processor_kwargs={"chat_template": CHAT})
        assert transformer.preprocess(["tea"])["modality"] == "message"
        modules = [transformer, Pooling(32, "mean")]
    elif kind == "static":
        modules = [static(words())]
    else:
        modules = [Transformer(folder), Pooling(32, "mean", include_prompt=kind == "transformer")]
    return SentenceTransformer(
        modules=modules, prompts=prompts, similarity_fn_name="dot", device="cpu"
    )


def by_role(model, texts):
    queries, *documents = texts
    return [model.encode_query(queries, convert_to_tensor=True)] + [
        model.encode_document(column, convert_to_tensor=True) for column in documents
    ]


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [
        *((kind, True) for kind in ("transformer", "without prompt tokens", "router", "chat")),
        *((kind, False) for kind in ("transformer", "static")),
    ],
)
def test_training_reads_what_is_encoded(folder, kind, prompts, tmp_path, caplog):
    """With the prompts of the model, or none at all; routes are those of the roles."""
    model = make(folder, kind, dict(PROMPTS))
    rows = make_rows(DATA, None, seed=0)
    config = TrainConfig(loss="dot", prompts=prompts, prior=True, max_steps=1, batch_size=4)
    trainer = make_trainer(model, DATA, rows, config, tmp_path)
    batch = list(rows.select(range(4)))
    features, _ = trainer.collect_features(trainer.data_collator(batch))
    with torch.no_grad():
        found = [model(dict(column))["sentence_embedding"] for column in features]
    plain = make(folder, kind)
    plain.load_state_dict(model.state_dict())
    texts = [[row[name] for row in batch] for name in rows.column_names]
    expected = by_role(model if prompts else plain, texts)
    torch.testing.assert_close(found, expected)
    trainer.train()
    assert "The prior does not contain" not in caplog.text
    assert ("begins with no prompt of the model" in caplog.text) is not prompts


@pytest.mark.parametrize(
    ("kind", "own", "given", "baked", "warned"),
    [
        ("transformer", PROMPTS, (None, None), ("", ""), {1, 2}),
        ("static", PROMPTS, (None, None), ("", ""), {1, 2}),
        ("router", PROMPTS, ("what is tea ", None), ("", ""), {2}),
        ("static", PROMPTS, ("see the notes ", "see the notes "), ("", ""), set()),
        ("transformer", PROMPTS, (None, None), ("What is tea ", "See the notes "), set()),
        ("static", {"query": "what is tea "}, (None, None), ("", ""), {1}),
        ("transformer", None, (None, None), ("", ""), set()),
        ("chat", PROMPTS, (None, None), ("", ""), {1, 2}),
        ("chat", PROMPTS, tuple(PROMPTS.values()), ("", ""), set()),
    ],
)
def test_a_first_batch_without_prompts_warns_once(folder, caplog, kind, own, given, baked, warned):
    model = make(folder, kind, own)
    loss = stm.DotRankingLoss(model, mini_batch_size=2 if kind == "transformer" else None)
    for _ in range(2):
        pairs = zip(baked, columns(4).values(), strict=True)
        texts = ([begin + text for text in column] for begin, column in pairs)
        roles = zip(texts, given, ("query", "document"), strict=True)
        loss([model.preprocess(text, prompt=prompt, task=role) for text, prompt, role in roles])
    messages = [record.message for record in caplog.records]
    found = [text for text in messages if "begins with no prompt" in text]
    for number in (1, 2):
        assert sum(f"text column {number} " in text for text in found) == (number in warned)
    assert len(found) == len(warned)


def test_a_data_set_without_prompts_warns_after_another_with_them(folder, caplog):
    model = make(folder, "transformer", PROMPTS)
    loss = stm.DotRankingLoss(model)
    for prompts in (PROMPTS.values(), (None, None), (None, None)):
        pairs = zip(columns(4).values(), prompts, strict=True)
        loss([model.preprocess(text, prompt=prompt) for text, prompt in pairs])
        assert caplog.text.count("begins with no prompt") == (0 if None not in prompts else 2)


@pytest.mark.parametrize(
    ("prompts", "options", "warns"),
    [
        ({"passage": "see "}, {}, True),
        ({"corpus": "see "}, {}, True),
        ({"passage": "see "}, {"corpus_prompt_name": "passage"}, False),
        ({"passage": "see ", "document": "see "}, {}, False),
        ({"query": "see "}, {}, False),
    ],
)
def test_a_prompt_that_no_document_gets_is_told(folder, tmp_path, caplog, prompts, options, warns):
    make(folder, "static", prompts).save_pretrained(str(tmp_path))
    model = stm.load(tmp_path)
    assert ("encoded without a prompt" in caplog.text) is (warns or bool(options))
    caplog.clear()
    evaluator = MagnitudeEvaluator(QUERIES, CORPUS, RELEVANT_DOCS, **options)
    for _ in range(2):
        evaluator(model)
    assert caplog.text.count("encoded without a prompt") == warns


@pytest.mark.parametrize(
    ("own", "expected"), [(None, ("Query: ", "Passage: ")), (PROMPTS, tuple(PROMPTS.values()))]
)
def test_revela_keeps_the_prompts_of_a_model(folder, own, expected):
    model = make(folder, "transformer", own)
    loss = stm.revela.RevelaLoss(model, *language_model())
    assert loss.collator.prefixes == (model.prompts["query"], model.prompts["document"]) == expected
