"""Forward passes on devices that this machine lacks: fake CUDA tensors refuse what would wait for
the device.

On a FakeTensor, ``.item()``, ``bool()``, ``nonzero`` and boolean indices raise, and so do operands
on two devices. The backward pass needs a real device.
"""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _tiny import ROWS, load_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from test_layers import MODULES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import st_magnitude as stm
from st_magnitude import DOT, Similarity, Term, infonce
from st_magnitude.data import task
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.kernel.batch import Above
from st_magnitude.losses import groups, probe
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.gradients import grad_scale


class NoFloat64(TorchDispatchMode):
    """Refuses float64 outside the CPU: Apple's GPUs do not have it, and others are slow at it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                assert value.dtype not in (torch.float64, torch.complex128), function
        return result


@pytest.fixture
def fakes() -> Iterator[None]:
    with FakeTensorMode(), NoFloat64():
        yield


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=dtype.is_floating_point)


def on_device(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tensors of each column, as fakes."""
    return [
        {name: leaf(*x.shape, dtype=x.dtype) for name, x in column.items() if torch.is_tensor(x)}
        for column in batch
    ]


@pytest.mark.usefixtures("fakes")
def test_values_cannot_be_read() -> None:
    with pytest.raises(Exception, match="local_scalar_dense"):
        leaf(3).sum().item()


def test_autocast_takes_the_type_of_the_device_from_a_tensor() -> None:
    for path in MODULES:
        assert not re.search(r"autocast\(\s*[\"']", path.read_text(encoding="utf-8")), path


BOTH = ("query_to_doc", "doc_to_query")
ALL = (*BOTH, "query_to_query", "doc_to_doc")
OPTIONS = {
    "plain": {},
    "directions": {"directions": ALL},
    "ids": {"exclude": lambda: leaf(10, dtype=torch.int64)},
    "margin": {"exclude": Above(lambda positives: positives + 0.1)},
    "labels": {"positives": lambda: leaf(10, dtype=torch.int64)},
    "pairs": {"targets": lambda: leaf(4, 10, dtype=torch.bool)},
    "log_q": {"log_q": lambda: leaf(10), "log_q_queries": lambda: leaf(6)},
}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("options", "is_learned"), [({}, False), *((options, True) for options in OPTIONS.values())]
)
def test_infonce(options: dict[str, Any], is_learned: bool) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    if "targets" not in options:
        options["all_queries"] = leaf(6, 8)
    terms = [Term(dim, tau) for dim in (3, None) for tau in (0.1, 0.05)]
    similarity = Similarity(1, 0)
    if is_learned:
        terms = [Term(term.dim, leaf() + 0.1) for term in terms]
        similarity = Similarity(leaf(), leaf())
    if "directions" not in options:
        options |= {"directions": BOTH, "partition_mode": "per_direction"}
    options |= {"offset": 2, "tile_rows": 3}
    loss = infonce(leaf(4, 8), leaf(10, 8), terms, similarity, **options)
    assert loss.shape == ()
    assert loss.device.type == "cuda"


TEXTS = [row[:3] for row in ROWS[:6]]
DEVICE_LOSSES = {
    "cosine": (stm.CosineRankingLoss, {}),
    "margin": (stm.QNormRankingLoss, {"margin": -0.1, "margin_strategy": "relative"}),
    "prior": (stm.DNormRankingLoss, {"prior": True}),
    "joint": (stm.CosineRankingLoss, {"directions": ("query_to_doc", "query_to_query")}),
    "learnable": (stm.LearnableNormLoss, {"prior": True}),
    "temp_agg_mrl": (stm.TempAggMRLLoss, {"similarity": "qnorm"}),
    "sigreg of prefixes": (stm.SIGRegInfoNCE, {"sigreg": stm.SIGReg(dims=(8, 32))}),
    "sigreg, drawn": (stm.SIGRegInfoNCE, {"sigreg": stm.SIGReg(8, dims=(8, 32), scale=None)}),
    "regression": (stm.SimilarityMSELoss, {}),
}


class Encoder(nn.Module):
    """A model on the device, with learned exponents."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cuda"):
            self.table = nn.Embedding(300, 32)
            self.norm = ExponentNorm(0.5, 0.5, learnable=True)

    def to(self, device: str) -> nn.Module:
        return self

    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        tokens = self.table(features["input_ids"])
        return features | {"sentence_embedding": tokens.mean(dim=1)}


@pytest.mark.parametrize(
    ("name", "mini_batch_size"),
    [*((name, None) for name in DEVICE_LOSSES), *((name, 4) for name in ("prior", "learnable"))],
)
def test_a_step_of_a_loss(
    folder: str, name: str, mini_batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first batch, whose values a loss may read, and up to the backward pass.

    The tokens are read once, to group texts by length. The mini-batches of a cached step are cut by
    sentence-transformers, which reads the longest text of each.
    """
    (loss_class, options), model = DEVICE_LOSSES[name], load_transformer(folder)
    if options.get("prior"):
        prior = stm.DocumentPrior.from_texts(model, [row[1] for row in TEXTS])
        options = options | {"prior": prior}
    loss = loss_class(model, scale=3.0, **options)
    loss._has_begun = True
    if loss_has_prior := options.get("prior"):
        loss_has_prior._has_begun = True
    is_ranking = isinstance(loss, stm.MagnitudeRankingLoss)
    texts = list(zip(*TEXTS, strict=True))[: 3 if is_ranking else 2]
    batch = [model.preprocess(list(column)) for column in texts]
    of_tokens = [{k: x for k, x in column.items() if k in groups.OF_TOKENS} for column in batch]
    reads = [groups._on_cpu(like) for like in of_tokens]
    monkeypatch.setattr(groups, "_on_cpu", lambda _: reads.pop(0))
    with FakeTensorMode(allow_non_fake_inputs=True), NoFloat64():
        loss.model = Encoder()
        probe.traits_of(loss.model).reads_padding = False
        columns = on_device(batch)
        if mini_batch_size is None or not is_ranking:
            value = loss(columns, None if is_ranking else torch.empty(6, device="cuda"))
        else:
            width = 32 + len(loss._learned())
            parts = [[leaf(4, width), leaf(2, width)] for _ in columns]
            value = loss.calculate_loss(parts, loss.read(columns))
        value = sum(value.values()) if isinstance(value, dict) else value
        assert value.device.type == "cuda"


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_norm", [True, False])
def test_a_layer_of_in_batch_attention(dtype: torch.dtype, v_norm: bool) -> None:
    attention = pytest.importorskip("st_magnitude.revela.attention")
    # without __init__, which reads the similarities to choose the pairs
    neighbours = attention.Neighbours.__new__(attention.Neighbours)
    neighbours.similarity, neighbours.v_norm, neighbours.calls = leaf(3, 3), v_norm, 0
    neighbours.read = [torch.tensor(x, device="cuda") for x in ([1], [0], [0, 1])]
    neighbours.key_mask = torch.ones(3, 5, dtype=torch.bool, device="cuda")
    query, key, value = (leaf(3, heads, 5, 6, dtype=dtype) for heads in (4, 2, 2))
    found = attention.in_batch_attention(query, key, value, neighbours)
    assert (found.shape, found.dtype, found.device.type) == (query.shape, dtype, "cuda")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("preset", ["norm-sym", "nonorm-i2t", "txtnorm-t2i"])
@pytest.mark.parametrize("positives", [False, True])
def test_the_loss_of_clip(preset: str, positives: bool) -> None:
    clip_loss = pytest.importorskip("st_magnitude.clip.loss")
    loss = clip_loss.AsymmetricClipLoss.from_preset(preset)
    loss._checked = True  # the look at the norms of the first batch waits for the device, once
    labels = torch.tensor([0, 1, 2, 0, 1, 2], device="cuda") if positives else None
    for scale in (leaf(1), 14.0):
        value = loss(leaf(6, 8), leaf(6, 8), scale, positives=labels)
        assert (value.dtype, value.device.type) == (torch.float32, "cuda")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_encoded_tasks_leave_apples_gpus(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search sums in float64, so it stays on a CUDA device and leaves mps."""
    monkeypatch.setattr(task, "check_finite", lambda *_: None)  # it waits for the device
    with torch.no_grad():  # autograd asks for a device that PyTorch was built for
        sides = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
        found = task.EncodedTask(RetrievalData({}, {}, {}), [], *sides, DOT)
    types = {found.queries.device.type, found.documents.device.type}
    assert types == {"cpu" if device == "mps" else device}


class Head(nn.Module):
    """(n, 6) -> (n, 8), without a parameter: Module.to cannot move a fake one."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features | {"sentence_embedding": features["sentence_embedding"] @ leaf(6, 8)}


def encoder(*ends: nn.Module) -> SentenceTransformer:
    model = SentenceTransformer(modules=[Head()], device="cpu")
    model.extend(ends)
    return model


def features() -> dict[str, Tensor]:
    return {"sentence_embedding": leaf(5, 6)}


@pytest.mark.usefixtures("fakes")
def test_grad_scale() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = grad_scale(leaf(4, 3, dtype=dtype), -0.5)
        assert (found.dtype, found.device.type) == (dtype, "cuda")
    model = encoder(Normalize())
    handle = stm.attach_grad_scale(model)
    hooks = [hook for module in model for hook in module._forward_hooks.values()]
    assert len(hooks) == 1
    hooks[
        0
    ].__self__.checked = True  # the look at the norms of the first batch waits for the device, once
    assert model(features())["sentence_embedding"].device.type == "cuda"
    handle.close()


@pytest.mark.usefixtures("fakes")
def test_a_step_that_the_monitor_does_not_measure() -> None:
    model = encoder(Normalize())
    monitor = stm.NormMonitor(nn.Identity(), every=3)
    monitor.on_train_begin(None, None, None, model=model)
    for step in (1, 2):
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        monitor.on_step_begin(None, state, None, optimizer=torch.optim.SGD([leaf(1)], 0.1))
        monitor.loss([features(), features()])
        model(features())
    assert not monitor.rows
