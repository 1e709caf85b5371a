"""Models without one embedding per text are refused by name, wherever a model comes in."""

import json

import pytest
from _tiny import columns, load_transformer
from sentence_transformers import CrossEncoder, MultiVectorEncoder

import st_magnitude as stm
from st_magnitude.surgery.normalize import add_normalize, rescale_output

QUERIES, DOCUMENTS = ({str(i): text for i, text in enumerate(texts)} for texts in columns(4).values())
TASK = QUERIES, DOCUMENTS, {"0": {"0"}}


@pytest.fixture(scope="module", params=[CrossEncoder, MultiVectorEncoder])
def other(request, folder):
    return request.param(folder, device="cpu", **({"num_labels": 1} if request.param is CrossEncoder else {}))


@pytest.mark.parametrize(
    "use",
    [
        *(getattr(stm, name) for name in stm.__all__ if name.endswith("Loss") or name == "SIGRegInfoNCE"),
        lambda model: stm.prepare(model, "dot"),
        stm.strip_normalize,
        add_normalize,
        rescale_output,
        stm.attach_grad_scale,
        lambda model: stm.export(model, "never-written"),
        stm.GeometryEvaluator(list(DOCUMENTS.values())),
        stm.MagnitudeEvaluator(*TASK),
        stm.CompressionEvaluator(*TASK),
        stm.ScoredPairsEvaluator(["a", "b", "c"], ["a", "b", "d"], [1.0, 0.5, 0.0]),
    ],
)
def test_the_class_is_named(other, use):
    with pytest.raises(TypeError, match=f"one embedding per text.* got a {type(other).__name__}"):
        use(other)


@pytest.mark.parametrize("name", ["SparseEncoder", "CrossEncoder", "MultiVectorEncoder"])
def test_load_does_not_convert(folder, tmp_path, name):
    path = stm.export(load_transformer(folder), tmp_path / "saved")
    file = path / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": name}))
    with pytest.raises(TypeError, match=f"is a {name}"):
        stm.load(path)


def test_load_knows_a_bare_cross_encoder(folder, tmp_path):
    CrossEncoder(folder, num_labels=1, device="cpu")[0].auto_model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="is a CrossEncoder"):
        stm.load(tmp_path)
