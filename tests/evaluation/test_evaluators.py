"""Behaviour that all search evaluators share."""

import csv
import itertools
from functools import partial

import pytest
from _lookup import bag
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, columns, load_transformer
from _trainer import make_trainer
from datasets import Dataset
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import CompressionEvaluator, MagnitudeEvaluator
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.normalize import score_by_cosine, scoring_of

KINDS = {
    "Magnitude": MagnitudeEvaluator,
    "Compression": partial(CompressionEvaluator, dims=[16]),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize(
    ("given", "query", "document"),
    [
        ({}, (None, None), (None, None)),
        ({"query_prompt": "ask: ", "corpus_prompt": "see: "}, ("ask: ", None), ("see: ", None)),
        ({"query_prompt_name": "s", "corpus_prompt_name": "p"}, (None, "s"), (None, "p")),
    ],
)
def test_each_side_is_encoded_once_with_its_role_and_prompt(
    kind, given, query, document, task, static_model, monkeypatch
):
    calls = []
    for role in ("query", "document"):
        encode = getattr(static_model, f"encode_{role}")

        def spy(texts, *a, _encode=encode, _role=role, **k):
            calls.append((_role, len(texts), (k["prompt"], k["prompt_name"]), k["batch_size"]))
            return _encode(texts, *a, **k)

        monkeypatch.setattr(static_model, f"encode_{role}", spy)
    static_model.prompts = {"s": "find: ", "p": "text: "}
    kind(**task, batch_size=7, **given)(static_model)
    assert calls == [("query", 8, query, 7), ("document", 20, document, 7)]


@every_kind
def test_the_similarity_is_the_models_own_at_each_call(kind, task, static_model):
    evaluator = kind(**task)
    figures = []
    for name in ("cosine", "dot"):
        static_model.similarity_fn_name = name
        figures.append(evaluator(static_model))
        assert figures[-1] == kind(**task, similarity=name)(static_model)
    assert figures[0] != figures[1]


HALF = Similarity(1.0, 0.5)


@pytest.mark.parametrize(
    ("closing", "states", "served", "before"),
    [
        ((), "dot", DOT, DOT),
        ((Normalize(),), "euclidean", COSINE, COSINE),
        ((Normalize(),), "dot", DOT, COSINE),
        ((ExponentNorm(1.0, 0.5),), "euclidean", HALF, HALF),
        ((Normalize(), ExponentNorm(1.0, 0.5)), "dot", HALF, COSINE),
    ],
)
def test_the_scoring_of_a_model(closing, states, served, before):
    model = bag(["a"], *closing, similarity=states)
    assert scoring_of(model) == served
    assert scoring_of(model, before_normalize=True) == before
    assert scoring_of(model, "qnorm", before_normalize=True) == Similarity.named("qnorm")
    said = []
    score_by_cosine(model, said.append)
    assert len(said) == (states != "dot")
    assert model.similarity_fn_name == ("dot" if states == "dot" else "cosine")


# what measures by the similarity of a model, whose distances no similarity ranks alike
MEASURES = {
    **{name: lambda model, data, kind=kind: kind(*data)(model) for name, kind in KINDS.items()},
    "exponent": lambda model, data: stm.calibrate_exponent(model, RetrievalData(*data)),
}


@pytest.mark.parametrize("states", ["euclidean", "manhattan"])
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_distances_that_no_similarity_ranks_alike_are_refused(measure, states, task, static_model):
    """Manhattan distances of unit vectors do not rank as cosine either."""
    static_model.similarity_fn_name = states
    with pytest.raises(ValueError, match=f"'{states}', which is not an .*pass similarity="):
        measure(static_model, task.values())
    if states == "manhattan":
        static_model.append(Normalize())
        with pytest.raises(ValueError, match=r"'manhattan'|all norms are 1"):
            measure(static_model, task.values())


@every_kind
def test_queries_without_relevant_documents_do_not_count(kind, task, static_model):
    expected = kind(**task)(static_model)
    evaluator = kind(**(task | {"queries": {"unjudged": "Who knows?"} | task["queries"]}))
    found = evaluator(static_model)
    assert evaluator.queries_ids == list(task["queries"])
    assert {len(values) for values in evaluator.per_query.values()} == {8}
    assert found == expected


def test_csv_files(task, static_model, tmp_path):
    evaluator = MagnitudeEvaluator(**task, name="dev")
    assert evaluator.primary_metric == "dev_matched_ndcg@10"
    folder = tmp_path / "new"
    first = evaluator(static_model, output_path=str(folder), epoch=1, steps=10)
    evaluator(static_model, output_path=str(folder), epoch=2, steps=20)
    MagnitudeEvaluator(**task, write_csv=False)(static_model, output_path=str(folder))
    [path] = folder.iterdir()
    assert path.name == "Magnitude_evaluation_dev_results.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row.pop("epoch"), row.pop("steps")) for row in rows] == [("1", "10"), ("2", "20")]
    assert {f"dev_{key}": float(value) for key, value in rows[0].items()} == first


def test_they_choose_the_best_checkpoint_in_the_trainer(task, model, tmp_path):
    """Three steps of different worth, the best of which is kept."""
    model.similarity_fn_name = "dot"
    evaluators = [kind(**task, name="dev") for kind in reversed(KINDS.values())]
    metric = "eval_dev_full_ndcg@10"
    options = {"max_steps": 3, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": metric, "evaluator": evaluators}
    trainer = make_trainer(model, MultipleNegativesRankingLoss(model), tmp_path, **options)
    trainer.train()
    history = [entry[metric] for entry in trainer.state.log_history if metric in entry]
    assert len(history) == 3
    assert trainer.state.best_metric == max(history) > min(history)
    best = KINDS["Compression"](**task)(trainer.model)["full_ndcg@10"]
    assert best == pytest.approx(trainer.state.best_metric)
    names = {path.name for path in (tmp_path / "eval").iterdir()}
    assert names >= {f"{kind}_evaluation_dev_results.csv" for kind in KINDS}


# --- on two processes, which share the texts, against one ----------------------------------------

ENDS = {
    "neither": (),
    "Normalize": (Normalize,),
    "ExponentNorm": (lambda: ExponentNorm(0.3, 0.4, learnable=True),),
}
TASK = (
    {f"q{i:02}": row[0] for i, row in enumerate(ROWS)},
    {f"d{i:02}{column}": row[column] for i, row in enumerate(ROWS) for column in (1, 2, 3)},
    {f"q{i:02}": {f"d{(i + k) % len(ROWS):02}1" for k in range(5)} for i in range(len(ROWS))},
)


def evaluators(dim):
    return [
        MagnitudeEvaluator(*TASK, name="search"),
        CompressionEvaluator(*TASK, name="compression", dims=[dim or 8]),
    ]


def evaluate(folder, output):
    """The report of the Trainer, for models with every end, whole and cut to a prefix."""
    options = {"per_device_eval_batch_size": 4, "ddp_backend": "gloo"}
    found = {}
    for end, dim in itertools.product(ENDS, (None, 16)):
        model = load_transformer(folder)
        for module in ENDS[end]:
            model.append(module())
        model.truncate_dim = dim
        options |= {"eval_data": Dataset.from_dict(columns()), "evaluator": evaluators(dim)}
        loss = stm.CosineRankingLoss(model)
        metrics = make_trainer(model, loss, output, **options).evaluate()
        names = ("eval_search", "eval_compression")
        found[end, dim] = {key: x for key, x in metrics.items() if key.startswith(names)}
    return found


@needs_fork
def test_two_processes_measure_what_one_does(folder, tmp_path):
    (alone,), both = (on_ranks(number, evaluate, folder, tmp_path) for number in (1, 2))
    for case, expected in alone.items():
        assert len(expected) > 30
        assert min(value for key, value in expected.items() if "ndcg" in key) > 0
        for rank in both:
            assert rank[case] == pytest.approx(expected, rel=1e-4, abs=1e-6), case
