"""Models in torch.compile and DistributedDataParallel: results as without, changed in place."""

from pathlib import Path

import pytest
import torch
from _surgery import DOCUMENTS, QUERIES, types
from _tiny import load_transformer
from sentence_transformers.base.modules import Normalize
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.surgery.raw import encode_raw, normalizes_output, returns_unit_vectors

DATA = stm.RetrievalData(
    {f"q{i}": text for i, text in enumerate(QUERIES)},
    {f"d{i}": text for i, text in enumerate(DOCUMENTS)},
    {f"q{i}": {f"d{i}"} for i in range(len(QUERIES))},
)
TASK = DATA.queries, DATA.corpus, DATA.relevant


@pytest.fixture(params=["torch.compile", "DDP"])
def wrap(request, tmp_path):
    if request.param == "torch.compile":
        yield lambda model: torch.compile(model, backend="eager")
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "use",
    [
        normalizes_output,
        returns_unit_vectors,
        lambda model: encode_raw(model, DOCUMENTS, "document").tolist(),
        MagnitudeEvaluator(*TASK),
        lambda model: MagnitudeEvaluator(*TASK)(stm.prepare(model, stm.Similarity(1, 0.5))),
        lambda model: stm.calibrate_exponent(stm.prepare(model, "dot"), DATA).best,
        lambda model: stm.cut_init(model) and None,
        lambda model: stm.CosineRankingLoss(model).get_config_dict(),
        lambda model: stm.QNormRankingLoss(stm.strip_normalize(model)).get_config_dict(),
        lambda model: stm.prepare(model, "qnorm") and stm.export(model, "saved") and None,
    ],
)
def test_as_without(folder, wrap, use, tmp_path, monkeypatch):
    found = []
    for name, way in (("bare", lambda model: model), ("wrapped", wrap)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        model = load_transformer(folder).append(Normalize())
        result = use(way(model))
        files = sorted(file.name for file in Path().rglob("*"))
        changed = types(model), model.similarity_fn_name, model.encode(DOCUMENTS).tolist()
        found.append((result, files, *changed))
    assert found[0] == found[1]


def test_a_loss_removes_the_normalize_inside(folder, wrap):
    """Also after the wrapper has run, and been compiled."""
    model = load_transformer(folder).append(Normalize())
    wrapped = wrap(model)
    batch = model.preprocess(DOCUMENTS)
    assert wrapped(dict(batch))["sentence_embedding"].norm(dim=1).std() < 1e-6
    stm.QNormRankingLoss(wrapped)
    assert wrapped(dict(batch))["sentence_embedding"].norm(dim=1).std() > 0.1


def test_exponents_are_not_added_to_a_model_that_is_distributed_already(folder, wrap):
    model = load_transformer(folder)
    if wrap is DistributedDataParallel:
        model.append(Normalize())
        with pytest.raises(ValueError, match="before you wrap"):
            stm.LearnableNormLoss(wrap(model))
        assert types(model) == ["Transformer", "Pooling", "Normalize"]
        stm.LearnableNormLoss(model)
    stm.LearnableNormLoss(wrap(model))
    assert types(model) == ["Transformer", "Pooling", "ExponentNorm"]
