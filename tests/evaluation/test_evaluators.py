"""Behaviour that all search evaluators share: encoding, similarity, CSV files, cards, and choosing
checkpoints."""

import csv
from functools import partial

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import SequentialEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator, HybridEvaluator, MagnitudeEvaluator
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "Magnitude": MagnitudeEvaluator,
    "Compression": partial(CompressionEvaluator, dims=[16]),
    "Hybrid": HybridEvaluator,
}
PAIRS = {
    "anchor": [
        "What do bees make?",
        "Where do fish live?",
        "Who bakes bread?",
        "What flies at night?",
    ],
    "positive": [
        "Bees make honey.",
        "Fish live in water.",
        "A baker bakes bread.",
        "Owls and bats fly at night.",
    ],
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
def test_each_side_is_encoded_once_with_its_role_and_prompt(kind, task, static_model, monkeypatch):
    calls = []
    for role in ("query", "document"):
        encode = getattr(static_model, f"encode_{role}")

        def spy(texts, *a, _encode=encode, _role=role, **k):
            calls.append((_role, len(texts), k["prompt"], k["prompt_name"], k["batch_size"]))
            return _encode(texts, *a, **k)

        monkeypatch.setattr(static_model, f"encode_{role}", spy)
    static_model.prompts = {"search": "find: ", "passage": "text: "}
    plain = kind(**task, batch_size=7)
    prompted = kind(**task, query_prompt="ask: ", corpus_prompt="answer: ")
    named = kind(**task, query_prompt_name="search", corpus_prompt_name="passage")
    assert len({str(evaluator(static_model)) for evaluator in (plain, prompted, named)}) > 1
    assert calls == [
        ("query", 8, None, None, 7),
        ("document", 20, None, None, 7),
        ("query", 8, "ask: ", None, 32),
        ("document", 20, "answer: ", None, 32),
        ("query", 8, None, "search", 32),
        ("document", 20, None, "passage", 32),
    ]


@every_kind
def test_the_similarity_is_the_models_own_at_each_call(kind, task, static_model):
    evaluator = kind(**task)
    figures = []
    for name in ("cosine", "dot"):
        static_model.similarity_fn_name = name
        figures.append(evaluator(static_model))
        assert figures[-1] == kind(**task, similarity=name)(static_model)
    assert figures[0] != figures[1]
    static_model.append(ExponentNorm(0.2, 0.6))
    behind = evaluator(static_model)
    del static_model[-1]
    assert behind == pytest.approx(
        kind(**task, similarity=stm.Similarity(0.2, 0.6))(static_model), rel=1e-6
    )
    static_model.similarity_fn_name = "euclidean"
    with pytest.raises(ValueError, match="'euclidean', which is not an inner product"):
        evaluator(static_model)


@every_kind
def test_queries_without_relevant_documents_do_not_count(kind, task, static_model):
    expected = kind(**task)(static_model)
    evaluator = kind(**(task | {"queries": {"unjudged": "Who knows?"} | task["queries"]}))
    found = evaluator(static_model)
    assert evaluator.queries_ids == list(task["queries"])
    assert {len(values) for values in evaluator.per_query.values()} == {8}
    assert found == expected


@every_kind
def test_arguments_are_checked(kind, task):
    for change, message in (
        ({"similarity": "l2"}, "No similarity is called 'l2'"),
        ({"corpus": {"d01": "only this"}}, "not in the corpus"),
        ({"relevant_docs": {}}, "None of the 8 queries has a relevant document"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**(task | change))


def test_csv_files(task, static_model, tmp_path):
    evaluator = MagnitudeEvaluator(**task, name="dev", truncate_dim=64)
    assert evaluator.primary_metric == "dev_64_matched_ndcg@10"
    first = evaluator(static_model, output_path=str(tmp_path / "new"), epoch=1, steps=10)
    evaluator(static_model, output_path=str(tmp_path / "new"), epoch=2, steps=20)
    for more in ({}, {"name": "silent", "write_csv": False}):
        MagnitudeEvaluator(**task, **more)(static_model, output_path=str(tmp_path / "new"))
    with (tmp_path / "new" / "Magnitude_evaluation_dev_64_results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["steps"]) for row in rows] == [("1", "10"), ("2", "20")]
    values = {
        f"dev_64_{key}": float(value)
        for key, value in rows[0].items()
        if key not in ("epoch", "steps")
    }
    assert values == first
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"Magnitude_evaluation_dev_64_results.csv", "Magnitude_evaluation_results.csv"}


def test_they_choose_the_best_checkpoint_in_the_trainer(task, model, tmp_path):
    """Three steps of different worth, the best of which is kept."""
    model.similarity_fn_name = "dot"
    first, *others = (
        kind(**task, name="dev")
        for kind in (KINDS["Compression"], MagnitudeEvaluator, HybridEvaluator)
    )
    metric = "eval_dev_full_ndcg@10"
    how = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "use_cpu": True,
        "report_to": [],
    }
    how |= {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    args = SentenceTransformerTrainingArguments(str(tmp_path), metric_for_best_model=metric, **how)
    data, loss = Dataset.from_dict(PAIRS), MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, args, data, loss=loss, evaluator=[first, *others])
    trainer.train()
    assert isinstance(trainer.evaluator, SequentialEvaluator)
    logs = [entry for entry in trainer.state.log_history if metric in entry]
    history = [entry[metric] for entry in logs]
    assert len(history) == 3
    assert trainer.state.best_metric == max(history) > min(history)
    keys = {
        "eval_dev_binary_16_norm_rescored_retention",
        "eval_dev_matched_map@100",
        "eval_dev_hybrid_mrr@10",
    }
    assert keys <= logs[0].keys()
    assert len({log["eval_dev_bm25_ndcg@10"] for log in logs}) == 1
    assert first(trainer.model)["dev_full_ndcg@10"] == pytest.approx(trainer.state.best_metric)
    names = {path.name for path in (tmp_path / "eval").iterdir()}
    assert names >= {f"{kind}_evaluation_dev_results.csv" for kind in KINDS}


@every_kind
def test_model_evaluate_and_its_card(kind, task, static_model, tmp_path):
    evaluator = kind(**task, similarity=stm.DOT, name="dev")
    metrics = static_model.evaluate(evaluator, output_path=str(tmp_path / "new"))
    assert 0.5 < metrics[evaluator.primary_metric] < 1.0
    static_model.save(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert type(evaluator).__name__ in card
    assert "Similarity(query=0.0, document=0.0)" in card
