"""Evaluators in a Trainer on two processes, which share the texts, against one process."""

import itertools

import pytest
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, columns, load_transformer
from _trainer import make_trainer
from datasets import Dataset
from sentence_transformers.base.modules import Normalize

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator, HybridEvaluator, MagnitudeEvaluator
from st_magnitude.modules import ExponentNorm

pytestmark = needs_fork

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
BM25 = {query: {"d001": 2.0, "d021": 1.0} for query in TASK[0]}


def evaluators(dim):
    return [
        MagnitudeEvaluator(*TASK, name="search"),
        CompressionEvaluator(*TASK, name="compression", dims=[dim or 8]),
        HybridEvaluator(*TASK, bm25=BM25, name="hybrid"),
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
        names = ("eval_search", "eval_compression", "eval_hybrid")
        found[end, dim] = {key: x for key, x in metrics.items() if key.startswith(names)}
    return found


def test_two_processes_measure_what_one_does(folder, tmp_path):
    (alone,), both = (on_ranks(number, evaluate, folder, tmp_path) for number in (1, 2))
    for case, expected in alone.items():
        assert len(expected) > 40
        assert min(value for key, value in expected.items() if "ndcg" in key) > 0
        for rank in both:
            assert rank[case] == pytest.approx(expected, rel=1e-4, abs=1e-6), case
