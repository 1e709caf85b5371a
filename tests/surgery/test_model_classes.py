"""Models without one dense embedding per text are refused by name, wherever a model comes in."""

import pytest
from _tiny import columns, save_transformer
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from transformers import AutoModelForMaskedLM

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator, MagnitudeEvaluator

QUERIES, DOCUMENTS = (
    {str(i): text for i, text in enumerate(texts)} for texts in columns(4).values()
)
TASK = QUERIES, DOCUMENTS, {i: {i} for i in QUERIES}
DATA = stm.RetrievalData(*TASK)
LOSS_NAMES = [name for name in stm.__all__ if name.endswith(("Loss", "SIGRegInfoNCE"))]
EVERYWHERE = [
    *(getattr(stm, name) for name in LOSS_NAMES),
    stm.strip_normalize,
    stm.attach_grad_scale,
    MagnitudeEvaluator(*TASK),
    CompressionEvaluator(*TASK),
    lambda model: stm.calibrate_exponent(model, DATA),
    lambda model: stm.prepare(model, "dot"),
    lambda model: stm.export(model, "never-written"),
]


@pytest.fixture(scope="module", params=[CrossEncoder, MultiVectorEncoder, SparseEncoder, str])
def other(request, folder, tmp_path_factory):
    if request.param is str:
        return "the-name-of-a-model"
    options = {"num_labels": 1} if request.param is CrossEncoder else {}
    if request.param is SparseEncoder:
        folder = save_transformer(tmp_path_factory.mktemp("mlm"), auto=AutoModelForMaskedLM)
    return request.param(folder, device="cpu", **options)


@pytest.mark.parametrize("use", EVERYWHERE)
def test_the_class_is_named(other, use):
    with pytest.raises(TypeError, match=f"got a {type(other).__name__}"):
        use(other)


def test_load_refuses_a_cross_encoder_that_upstream_converts_in_silence(folder, tmp_path):
    bare = CrossEncoder(folder, num_labels=1, device="cpu")[0].auto_model
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(TypeError, match="is a CrossEncoder"):
        stm.load(tmp_path / "bare")
