"""Evaluators in a Trainer on two processes, which share the texts, against one process."""

import os
import sys

import pytest
import torch.distributed as dist
from _ranks import on_ranks
from _tiny import ROWS, columns, load_transformer
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Normalize

import st_magnitude as stm
from st_magnitude.evaluation import (
    CompressionEvaluator,
    GeometryEvaluator,
    HybridEvaluator,
    MagnitudeEvaluator,
)
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks processes that have used torch"
)

ENDS = {
    "neither": (),
    "Normalize": (Normalize,),
    "ExponentNorm": (lambda: ExponentNorm(0.3, 0.4, learnable=True),),
}
DIMS = (None, 16)
QUERIES = {f"q{i:02}": row[0] for i, row in enumerate(ROWS)}
CORPUS = {f"d{i:02}{column}": row[column] for i, row in enumerate(ROWS) for column in (1, 2, 3)}
RELEVANT = {
    query: {f"d{(i + k) % len(ROWS):02}1" for k in range(5)} for i, query in enumerate(QUERIES)
}


def evaluators(dim):
    task = (QUERIES, CORPUS, RELEVANT)
    passages = [row[1] for row in ROWS]
    bm25 = {query: {"d001": 2.0, "d021": 1.0} for query in QUERIES}
    return [
        MagnitudeEvaluator(*task, name="search"),
        CompressionEvaluator(*task, name="compression", dims=[dim or 8]),
        HybridEvaluator(*task, bm25=bm25, name="hybrid"),
        GeometryEvaluator(passages, list(QUERIES.values()), name="geometry"),
    ]


def evaluate(folder, output):
    """The report of the Trainer, for models with every end, whole and cut to a prefix."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    args = SentenceTransformerTrainingArguments(
        str(output),
        use_cpu=True,
        per_device_eval_batch_size=4,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    found = {}
    for end, modules in ENDS.items():
        for dim in DIMS:
            model = load_transformer(folder)
            for module in modules:
                model.append(module())
            model.truncate_dim = dim
            data = Dataset.from_dict(columns())
            loss = stm.CosineRankingLoss(model)
            metrics = SentenceTransformerTrainer(
                model, args, eval_dataset=data, loss=loss, evaluator=evaluators(dim)
            ).evaluate()
            names = ("eval_search", "eval_compression", "eval_hybrid", "eval_geometry")
            found[end, dim] = {key: x for key, x in metrics.items() if key.startswith(names)}
    return found


@pytest.fixture(scope="module")
def one_and_two(folder, tmp_path_factory):
    return [
        on_ranks(number, evaluate, folder, tmp_path_factory.mktemp("ranks")) for number in (1, 2)
    ]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("end", ENDS)
def test_two_processes_measure_what_one_does(one_and_two, end, dim):
    (alone,), both = one_and_two
    assert len(alone[end, dim]) > 40
    assert min(value for key, value in alone[end, dim].items() if "ndcg" in key) > 0
    for rank in both:
        assert rank[end, dim] == pytest.approx(alone[end, dim], rel=1e-4, abs=1e-6)
