"""Surgery on models: what their embeddings, and the folders that they are saved to, look like afterwards."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from _tiny import ROWS, load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm
from torch import nn

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import normalizes_output

pytestmark = pytest.mark.usefixtures("one_thread")

QUERIES = [row[0] for row in ROWS[:6]]
DOCUMENTS = [row[1] for row in ROWS[:6]]
DISCRETE = ["cosine", "dot", "qnorm", "dnorm"]


def encode(model, texts=DOCUMENTS):
    return model.encode(texts, convert_to_tensor=True)


def scores(model):
    """By whatever function the model names, as its users will."""
    queries, documents = model.encode_query(QUERIES), model.encode_document(DOCUMENTS)
    return model.similarity(queries, documents)


def types(model):
    return [type(module).__name__ for module in model]


def unit(embeddings):
    return embeddings / embeddings.norm(dim=1, keepdim=True)


# --- strip, add, prepare ----------------------------------------------------------------------------------------------


def test_strip_and_add(model):
    raw = encode(model)
    assert (raw.norm(dim=1) > 2).all()
    for _ in range(2):
        assert stm.add_normalize(model) is model
        assert types(model) == ["Transformer", "Pooling", "Normalize"]
        torch.testing.assert_close(encode(model), unit(raw))
    for _ in range(2):
        assert stm.strip_normalize(model) is model
        assert types(model) == ["Transformer", "Pooling"]
        assert torch.equal(encode(model), raw)


def test_strip_takes_all_of_them(model):
    model.extend([Normalize(), Normalize(), ExponentNorm(0.5, 0.5)])
    assert normalizes_output(model)
    assert types(stm.strip_normalize(model)) == ["Transformer", "Pooling"]


def test_normalize_in_front_of_a_head_stays(model):
    model.extend([Normalize(), Dense(32, 32, activation_function=None)])
    assert not normalizes_output(model)
    assert types(stm.strip_normalize(model)) == ["Transformer", "Pooling", "Normalize", "Dense"]


def test_dropout_hides_nothing(model):
    model.extend([Normalize(), Dropout(0.1)])
    assert normalizes_output(model)
    with pytest.raises(ValueError, match="followed by Dropout"):
        stm.strip_normalize(model)


def test_exponents_of_unit_vectors_are_unit_vectors(model):
    model.extend([Normalize(), ExponentNorm(0.5, 0.5)])
    torch.testing.assert_close(encode(model).norm(dim=1), torch.ones(len(DOCUMENTS)))
    assert normalizes_output(model)
    with pytest.raises(ValueError, match=r"stm\.strip_normalize\(model\)"):
        stm.LearnableNormLoss(model)
    with pytest.raises(ValueError, match=r"stm\.strip_normalize\(model\)"):
        stm.rescale_output(model, 2.0)


def test_minilm_ends_in_normalize(minilm):
    assert normalizes_output(minilm)
    directions = encode(minilm)
    raw = encode(stm.strip_normalize(minilm))
    assert 4 < raw.norm(dim=1).mean() < 7
    torch.testing.assert_close(unit(raw), directions)


@pytest.mark.parametrize("before", ["raw", "normalized", "exponent"])
@pytest.mark.parametrize(
    ("similarity", "tail", "function"),
    [
        ("cosine", "Normalize", "cosine"),
        ("dot", "Pooling", "dot"),
        ("qnorm", "Pooling", "dot"),
        ("dnorm", "Pooling", "cosine"),
        (stm.Similarity(0.0, 0.6), "ExponentNorm", "dot"),
        (stm.Similarity(1.0, 0.4), "ExponentNorm", "dot"),
        (stm.Similarity(0.3, 1.0), "Pooling", "cosine"),
        (stm.Similarity(0.3, 0.0), "Pooling", "dot"),
    ],
)
def test_prepare(model, before, similarity, tail, function):
    raw = {"queries": encode(model, QUERIES), "documents": encode(model)}
    model.extend({"raw": [], "normalized": [Normalize()], "exponent": [ExponentNorm(0.5, 0.5)]}[before])
    for _ in range(2):
        assert stm.prepare(model, similarity) is model
        assert types(model) == ["Transformer", "Pooling", *([] if tail == "Pooling" else [tail])]
        assert model.similarity_fn_name == function
    # Whatever the tail, the scores rank as the similarity does
    query, document = stm.Similarity.named(similarity).exponents
    lengths = raw["queries"].norm(dim=1)[:, None] ** (1 - query), raw["documents"].norm(dim=1) ** (1 - document)
    expected = unit(raw["queries"]) @ unit(raw["documents"]).T * lengths[0] * lengths[1]
    assert torch.equal(scores(model).argsort(dim=1), expected.argsort(dim=1))


def test_prepare_knows_its_names(model):
    with pytest.raises(ValueError, match="euclidean"):
        stm.prepare(model, "euclidean")


def routes(query, document):
    return Router({"query": query, "document": document}, default_route="document")


def head(*more):
    return [Dense(32, 32, activation_function=None), *more]


def test_routes_are_stripped(model):
    model.append(routes(head(Normalize()), head(Normalize())))
    assert normalizes_output(model)
    directions = model.encode_query(QUERIES, convert_to_tensor=True), model.encode_document(QUERIES)
    stm.prepare(model, "qnorm")
    assert not normalizes_output(model)
    assert model.similarity_fn_name == "dot"
    raw = model.encode_query(QUERIES, convert_to_tensor=True)
    assert raw.norm(dim=1).std() > 0
    torch.testing.assert_close(unit(raw), directions[0])
    torch.testing.assert_close(unit(model.encode_document(QUERIES, convert_to_tensor=True)).numpy(), directions[1])


def test_one_route_of_two(model):
    model.append(routes(head(Normalize()), head()))
    assert normalizes_output(model)  # a loss of magnitude would see unit queries
    stm.add_normalize(model)
    for embeddings in (model.encode_query(QUERIES, convert_to_tensor=True), model.encode_document(QUERIES)):
        torch.testing.assert_close(torch.as_tensor(embeddings).norm(dim=1), torch.ones(len(QUERIES)))
    assert len(stm.add_normalize(model)) == 4


def test_a_route_of_nothing_but_normalize(model):
    model.append(routes(head(Normalize()), [Normalize()]))
    with pytest.raises(ValueError, match=r"'document'.*del model\[-1\]"):
        stm.strip_normalize(model)
    assert [len(route) for route in model[-1].sub_modules.values()] == [2, 1]  # all or nothing


# --- rescale_output ---------------------------------------------------------------------------------------------------


def check_rescaled(model, parameters_changed, texts=DOCUMENTS):
    """Norms by the factor, cosines not at all, through the named parameters only."""
    before, state = encode(model, texts).double(), {k: v.clone() for k, v in model.state_dict().items()}
    assert before.norm(dim=1).std() > 1e-3
    assert stm.rescale_output(model, 0.3) is model
    after = encode(model, texts).double()
    torch.testing.assert_close(after.norm(dim=1), 0.3 * before.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(unit(after), unit(before), rtol=0, atol=1e-5)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert {name.split(".", 1)[1] for name in changed} == parameters_changed


def test_rescale_minilm(minilm):
    layer_norm = "model.encoder.layer.5.output.LayerNorm"
    check_rescaled(stm.strip_normalize(minilm), {f"{layer_norm}.weight", f"{layer_norm}.bias"})


@pytest.mark.parametrize(
    ("model_type", "pooling", "changed"),
    [
        (
            "bert",
            "mean",
            {"model.encoder.layer.1.output.LayerNorm.weight", "model.encoder.layer.1.output.LayerNorm.bias"},
        ),
        (
            "distilbert",
            "cls",
            {"model.transformer.layer.1.output_layer_norm.weight", "model.transformer.layer.1.output_layer_norm.bias"},
        ),
        ("modernbert", "mean", {"model.final_norm.weight"}),
        ("llama", "lasttoken", {"model.norm.weight"}),
        ("qwen2", "lasttoken", {"model.norm.weight"}),
        ("gemma", "lasttoken", {"model.norm.weight"}),  # multiplies by 1 + weight
        ("t5", "mean", {"model.encoder.final_layer_norm.weight"}),
    ],
)
def test_rescale_transformers(tmp_path, model_type, pooling, changed):
    check_rescaled(load_transformer(save_transformer(tmp_path, model_type), pooling), changed)


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU()])
def test_rescale_dense(model, activation):
    model.append(Dense(32, 24, activation_function=activation))
    check_rescaled(model, {"linear.weight", "linear.bias"})


def test_rescale_layer_norm_head(model):
    model.append(LayerNorm(32))
    with torch.no_grad():
        model[-1].norm.weight.copy_(torch.rand(32) + 0.5)
        model[-1].norm.bias.normal_()
    check_rescaled(model, {"norm.weight", "norm.bias"})


def test_rescale_static_embedding(static_model):
    check_rescaled(static_model, {"embedding.weight"})


def test_rescale_in_front_of_exponents(model):
    raw, layer_norm = encode(model), "model.transformer.layer.1.output_layer_norm"
    model.append(ExponentNorm(0.3, 0.5))
    stm.rescale_output(model, 0.3)
    assert types(model) == ["Transformer", "Pooling", "ExponentNorm"]
    torch.testing.assert_close(encode(model), unit(raw) * (0.3 * raw.norm(dim=1, keepdim=True)) ** 0.5)
    assert layer_norm in " ".join(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("probe", [None, DOCUMENTS])
def test_rescale_to_mean_norm_one(model, probe):
    texts = probe or stm.surgery._PROBE
    assert encode(model, texts).norm(dim=1).mean() > 2
    stm.rescale_output(model, probe=probe)
    assert encode(model, texts).norm(dim=1).mean().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("factor", [0, -2.0, float("nan")])
def test_rescale_wants_a_positive_factor(model, factor):
    with pytest.raises(ValueError, match="positive"):
        stm.rescale_output(model, factor)


def test_rescale_refuses_normalize(model):
    with pytest.raises(ValueError, match=r"stm\.strip_normalize\(model\)"):
        stm.rescale_output(stm.add_normalize(model), 2.0)


@pytest.mark.parametrize("case", ["shared layers", "residual", "tanh", "behind a head"])
def test_rescale_refuses_what_it_cannot_do(model, tmp_path, case):
    if case == "shared layers":  # ALBERT: one layer, one LayerNorm, used twice
        model = load_transformer(save_transformer(tmp_path, "albert"))
    elif case == "residual":
        model.append(Dense(32, 32, activation_function=None, use_residual=True))
    elif case == "tanh":
        model.append(Dense(32, 32))
    else:
        model.append(routes(head(), head()))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"Append a Dense|No last affine map"):
        stm.rescale_output(model, 0.3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- cut-initialisation -----------------------------------------------------------------------------------------------


def test_cut_of_minilm_is_exact(minilm, caplog):
    """It ends in Normalize, behind which nothing changes; before it norms are a third, and ranks as they were."""
    directions = encode(minilm)
    raw = encode(stm.strip_normalize(copy.deepcopy(minilm)))
    report = stm.cut_init(minilm, c=3.0)
    assert types(minilm) == ["Transformer", "Pooling", "Normalize"]
    assert set(report.parameters) == {f"0.model.encoder.layer.5.output.LayerNorm.{p}" for p in ("weight", "bias")}
    torch.testing.assert_close(encode(minilm), directions, rtol=1e-5, atol=1e-6)
    cut = encode(stm.strip_normalize(minilm))
    torch.testing.assert_close(cut, raw / 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(report.norms_after["text"], report.norms_before["text"] / 3, rtol=1e-6)
    assert report.spearman == {"text": 1.0}
    assert "ratio 0.3333" in str(report)
    assert "Spearman of similarities 1.000" in str(report)
    assert not caplog.records


def test_cut_of_the_output_speeds_up_the_last_map_alone(model):
    """Similarities do not change, so layers below get the gradient that they got before."""
    model.double().append(Normalize())
    columns = [dict(model.preprocess(texts)) for texts in (QUERIES, DOCUMENTS)]

    def gradients():
        model.zero_grad()
        stm.CosineRankingLoss(model)([dict(column) for column in columns]).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    cut = set(stm.cut_init(model, 3.0).parameters)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, before[name] * (3 if name in cut else 1), rtol=1e-5, atol=1e-7)


def test_cut_of_everything_warns_and_is_told(minilm, caplog):
    report = stm.cut_init(minilm, c=3.0, where="all", probe=QUERIES + DOCUMENTS)
    assert len(report.parameters) == len(list(minilm.parameters()))
    assert report.spearman["text"] < 0.6
    assert ["destroys what it has learned" in record.message for record in caplog.records] == [True]


def fresh(model):
    """The same architecture as it leaves its constructor."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def test_untrained_models_are_cut_without_a_warning(model, caplog):
    before = {name: p.detach().clone() for name, p in fresh(model).named_parameters()}
    stm.cut_init(model, c=4.0, where="all")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] / 4)
    assert not caplog.records


def test_weights_without_a_bias_look_trained_as_well(tmp_path, caplog):
    stm.cut_init(load_transformer(save_transformer(tmp_path, "llama"), "lasttoken"), where="all")
    assert "destroys" in caplog.text


@pytest.mark.parametrize(
    ("kind", "pooling"), [("bert", "cls"), ("llama", "lasttoken"), ("gemma", "lasttoken"), ("t5", "mean")]
)
def test_cut_of_encoders_and_decoders(tmp_path, kind, pooling):
    model = load_transformer(save_transformer(tmp_path, kind), pooling)
    raw = encode(model)
    report = stm.cut_init(model, 9.0)
    torch.testing.assert_close(encode(model), raw / 9, rtol=1e-4, atol=1e-5)
    assert report.spearman["text"] == pytest.approx(1)


def test_cut_of_heads(model):
    model.extend([*head(), Normalize()])
    report = stm.cut_init(model, 3.0, probe=DOCUMENTS)
    assert set(report.parameters) == {"2.linear.weight", "2.linear.bias"}
    assert len(report.norms_before["text"]) == len(DOCUMENTS)


@pytest.mark.parametrize("case", ["shared layers", "tanh", "routes"])
def test_cut_says_so_when_there_is_no_last_affine_map(model, tmp_path, case):
    if case == "shared layers":
        model = load_transformer(save_transformer(tmp_path, "albert"))
    else:
        model.append(Dense(32, 32) if case == "tanh" else routes(head(), head()))
    model.append(Normalize())
    before, modules = copy.deepcopy(model.state_dict()), types(model)
    with pytest.raises(ValueError, match=r"Append a Dense|No last affine map"):
        stm.cut_init(model)
    assert types(model) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_cut_by_choice(model):
    names = [name for name, _ in model.named_parameters() if name.endswith("lin2.weight")]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = stm.cut_init(
        model, 2.0, where=lambda name, parameter: name.endswith("lin2.weight") and parameter.ndim == 2
    )
    assert list(report.parameters) == names
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] / (2 if name in names else 1))
    with pytest.raises(ValueError, match="no parameter"):
        stm.cut_init(model, where=lambda name, parameter: False)


class Clip(nn.Module):
    """The names of open_clip: a ViT's or a ResNet's projection, a text projection, a logit scale."""

    def __init__(self, kind):
        super().__init__()
        self.visual = nn.Module()
        if kind == "vit":
            self.visual.proj = nn.Parameter(torch.randn(6, 4))
        else:
            self.visual.attnpool = nn.Module()
            self.visual.attnpool.c_proj = nn.Linear(6, 4)
        self.token_embedding = nn.Embedding(9, 6)
        self.text_projection = nn.Parameter(torch.randn(6, 4)) if kind == "vit" else nn.Linear(6, 4)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.tensor(-1.0))
        self.tail = nn.Identity()

    def project(self, x, projection):
        return x @ projection if isinstance(projection, nn.Parameter) else projection(x)

    def encode_image(self, image, normalize=False):
        projection = self.visual.proj if hasattr(self.visual, "proj") else self.visual.attnpool.c_proj
        return self.tail(self.project(image, projection))

    def encode_text(self, text, normalize=False):
        return self.project(self.token_embedding(text).mean(1), self.text_projection)


CLIP_PROBE = torch.linspace(-1, 1, 42).view(7, 6).sin(), torch.arange(21).view(7, 3) % 9


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_cut_of_clip_projections(kind):
    model = Clip(kind).double()
    image, text = model.encode_image(CLIP_PROBE[0].double()), model.encode_text(CLIP_PROBE[1])
    report = stm.cut_init(model, 3.0, probe=(CLIP_PROBE[0].double(), CLIP_PROBE[1]))
    torch.testing.assert_close(model.encode_image(CLIP_PROBE[0].double()), image / 3)
    torch.testing.assert_close(model.encode_text(CLIP_PROBE[1]), text / 3)
    assert len(report.parameters) == (2 if kind == "vit" else 4)
    assert set(report.spearman) == {"image", "text"}
    assert (model.logit_scale.item(), model.logit_bias.item()) == (2.5, -1.0)


def test_cut_of_all_spares_logit_scale_and_ties():
    model = Clip("vit")
    model.twin = nn.Module()
    model.twin.weight = model.token_embedding.weight  # tied by identity
    model.view = nn.Parameter(model.text_projection.detach())  # and by storage
    embedding, projection = model.token_embedding.weight.detach().clone(), model.text_projection.detach().clone()
    report = stm.cut_init(model, 5.0, where="all", probe=CLIP_PROBE)
    torch.testing.assert_close(model.token_embedding.weight.detach(), embedding / 5)
    torch.testing.assert_close(model.text_projection.detach(), projection / 5)
    assert (model.logit_scale.item(), model.logit_bias.item()) == (2.5, -1.0)
    assert not {"logit_scale", "logit_bias", "twin.weight", "view"} & set(report.parameters)


def test_cut_of_clip_that_is_not_linear_at_the_end_is_undone():
    model = Clip("vit")
    model.tail = nn.Tanh()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="something nonlinear"):
        stm.cut_init(model, probe=CLIP_PROBE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_cut_of_other_modules():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    with pytest.raises(ValueError, match="No last affine map found in the image tower"):
        stm.cut_init(model)
    report = stm.cut_init(model, 2.0, where="all", probe=CLIP_PROBE[0])
    assert len(report.parameters) == 4
    assert report.norms_after["output"].mean() < 0.6 * report.norms_before["output"].mean()
    assert stm.cut_init(model, 2.0, where="all").norms_before == {}


@pytest.mark.parametrize(("dtype", "c"), [(torch.float32, 3.0), (torch.float64, 3.0), (torch.bfloat16, 4.0)])
def test_cut_of_a_real_open_clip(open_clip_model, dtype, c):
    model = open_clip_model.to(dtype).eval()
    before = copy.deepcopy(model.state_dict())
    images, tokens = torch.randn(7, 3, 16, 16, dtype=dtype), torch.randint(1, 40, (9, 6))
    with torch.no_grad():
        raw, scores = (model.encode_image(images), model.encode_text(tokens)), model.get_logits(images, tokens)[0]
    report = stm.cut_init(model, c)  # its own probe
    assert set(report.parameters) == {"visual.proj", "text_projection"}
    assert report.spearman == {"image": 1.0, "text": 1.0}
    for role, norms in report.norms_before.items():
        np.testing.assert_allclose(report.norms_after[role], norms / c, rtol=1e-5)
    for name, value in model.state_dict().items():  # logit_scale among those that stay
        assert torch.equal(value, before[name] / c if name in report.parameters else before[name]), name
    with torch.no_grad():
        for x, cut in zip(raw, (model.encode_image(images), model.encode_text(tokens)), strict=True):
            torch.testing.assert_close(cut, x / c)
        assert torch.equal(model.get_logits(images, tokens)[0].argsort(), scores.argsort())


@pytest.mark.parametrize(
    ("options", "message"), [({"c": 0}, "positive"), ({"c": float("nan")}, "positive"), ({"where": "last"}, "'last'")]
)
def test_cut_checks_its_arguments(model, options, message):
    with pytest.raises(ValueError, match=message):
        stm.cut_init(model, **options)


# --- export and load --------------------------------------------------------------------------------------------------

FRESH_PROCESS = """
import json, sys
sys.modules["st_magnitude"] = None  # an import of it fails from here on
from sentence_transformers import SentenceTransformer
folders, queries, documents = json.load(sys.stdin)
found = {}
for folder in folders:
    model = SentenceTransformer(folder, device="cpu")
    scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
    found[folder] = {"scores": scores.tolist(), "function": model.similarity_fn_name}
try:
    import st_magnitude
except ImportError:
    json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """Folders of every export that needs nothing of ours, the scores in memory, and those of a fresh process."""
    root, expected = tmp_path_factory.mktemp("exported"), {}
    for name in DISCRETE:
        model = stm.prepare(load_transformer(folder), name)
        expected[str(stm.export(model, root / name))] = scores(model)
    calibrated = stm.prepare(load_transformer(folder), "qnorm")
    queries, documents = encode(calibrated, QUERIES), encode(calibrated)
    expected[str(stm.export(calibrated, root / "calibrated", calibrated_scores=True))] = unit(queries) @ documents.T
    baked = stm.prepare(load_transformer(folder), stm.Similarity(0.5, 0.5))
    expected[str(stm.export(baked, root / "baked", bake_exponent=True))] = queries @ documents.T
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(root / "found.json")],
        input=json.dumps([list(expected), QUERIES, DOCUMENTS]),
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads((root / "found.json").read_text())
    return {path.rsplit("/")[-1]: (path, expected[path], found[path]) for path in expected}


@pytest.mark.parametrize(
    ("name", "function"),
    [*zip(DISCRETE, ["cosine", "dot", "dot", "cosine"], strict=True), ("calibrated", "dot"), ("baked", "dot")],
)
def test_fresh_process_without_this_package(exported, name, function):
    path, expected, found = exported[name]
    assert found["function"] == function
    torch.testing.assert_close(torch.tensor(found["scores"]), expected, rtol=1e-5, atol=1e-5)
    with open(f"{path}/modules.json") as modules:
        assert all(module["type"].startswith("sentence_transformers.") for module in json.load(modules))
    with open(f"{path}/config_sentence_transformers.json") as config:
        assert json.load(config)["similarity_fn_name"] == function


def test_calibrated_scores(model, tmp_path):
    stm.prepare(model, "qnorm")
    queries, documents, modules = encode(model, QUERIES), encode(model), list(model)
    stm.export(model, tmp_path, calibrated_scores=True)
    assert list(model) == modules  # the same objects: nothing was added to the model in memory
    assert torch.equal(encode(model, QUERIES), queries)

    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    torch.testing.assert_close(loaded.encode_query(QUERIES, convert_to_tensor=True), unit(queries))
    torch.testing.assert_close(loaded.encode_document(DOCUMENTS, convert_to_tensor=True), documents)
    torch.testing.assert_close(loaded.encode(DOCUMENTS, convert_to_tensor=True), documents)
    torch.testing.assert_close(scores(loaded), unit(queries) @ documents.T)
    with pytest.raises(ValueError, match=r"del model\[-1\]"):
        stm.prepare(loaded, "cosine")


@pytest.mark.parametrize("similarity", ["cosine", "dnorm", stm.Similarity(1.0, 0.5)])
def test_calibrated_scores_need_document_norms(model, tmp_path, similarity):
    stm.prepare(model, similarity)
    remedy = "gamma_query to 1" if isinstance(similarity, stm.Similarity) else r"stm\.prepare\(model, 'qnorm'\)"
    with pytest.raises(ValueError, match=remedy):
        stm.export(model, tmp_path / "out", calibrated_scores=True)
    assert not (tmp_path / "out").exists()


def test_fractional_exponent_is_kept(model, tmp_path):
    stm.prepare(model, stm.Similarity(1.0, 0.4))
    path = stm.export(model, tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(path), device="cpu")
    loaded = stm.load(path, device="cpu")
    assert loaded[-1].gamma_document == pytest.approx(0.4)
    assert torch.equal(scores(loaded), scores(model))


def test_exponent_is_baked(model, tmp_path):
    raw = encode(model)
    stm.prepare(model, stm.Similarity(0.3, 0.4))
    expected = scores(model)
    stm.export(model, tmp_path, bake_exponent=True)
    assert types(model) == ["Transformer", "Pooling", "ExponentNorm"]
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert types(loaded) == ["Transformer", "Pooling"]
    torch.testing.assert_close(encode(loaded), raw)
    gamma = json.loads((tmp_path / "st_magnitude.json").read_text())["document_exponent"]
    assert gamma == pytest.approx(0.4)
    # What the writer of the index does, and the reader not: the ranking is the one that was trained
    index = torch.nn.functional.normalize(encode(loaded)) * encode(loaded).norm(dim=1, keepdim=True) ** (1 - gamma)
    found = encode(loaded, QUERIES) @ index.T
    assert torch.equal(found.argsort(dim=1), expected.argsort(dim=1))


def test_baking_needs_an_exponent(model, tmp_path):
    with pytest.raises(ValueError, match="ExponentNorm"):
        stm.export(stm.prepare(model, "qnorm"), tmp_path, bake_exponent=True)


def test_load_is_plain_for_plain_models(minilm_path):
    loaded = stm.load(minilm_path, device="cpu", truncate_dim=64)
    assert types(loaded) == ["Transformer", "Pooling", "Normalize"]
    assert loaded.encode("tea").shape == (64,)


def test_load_runs_no_code_from_the_folder(model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    path, proof = tmp_path / "model", tmp_path / "it_ran"
    stm.export(stm.prepare(model, stm.Similarity(1.0, 0.5)), path)
    evil = f"open({str(proof)!r}, 'w')\nfrom sentence_transformers.base.modules import Normalize as Evil\n"
    for name in ("modeling.py", "modules.py", "__init__.py", "st_magnitude.py", "st_magnitude/modules.py"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(evil)
    monkeypatch.chdir(path)
    assert isinstance(stm.load(path, device="cpu")[-1], ExponentNorm)
    assert not proof.exists()

    modules = json.loads((path / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "", "type": "modeling.Evil"})
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="trust_remote_code"):
        stm.load(path, device="cpu")
    assert not proof.exists()
    stm.load(path, device="cpu", trust_remote_code=True)  # the trap was a live one
    assert proof.exists()
