"""AsymmetricClipLoss against its formula, against open_clip's ClipLoss, and on two ranks."""

import pytest
import torch
import torch.distributed as dist
from _open_clip_tiny import open_clip
from _ranks import needs_fork, on_ranks
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.clip import PRESETS, AsymmetricClipLoss

EXPONENTS = {  # Table 6, by hand: (image, text), weights of (i2t, t2i)
    "norm-sym": ((1, 1), (0.5, 0.5)),
    "nonorm-sym": ((0, 0), (0.5, 0.5)),
    "imgnorm-i2t": ((1, 0), (1, 0)),
    "nonorm-i2t": ((0, 0), (1, 0)),
    "txtnorm-t2i": ((0, 1), (0, 1)),
    "nonorm-t2i": ((0, 0), (0, 1)),
}


def formula(preset, images, texts, logit_scale, logit_bias=0.0, targets=None):
    """The definition; targets: (B, B) weights of positives, which are symmetric."""
    exponents, weights = EXPONENTS[preset]
    images, texts = (
        x / x.norm(dim=1, keepdim=True) ** gamma
        for x, gamma in zip((images, texts), exponents, strict=True)
    )
    logits = logit_scale * images @ texts.T + logit_bias
    own = torch.arange(len(images)) if targets is None else targets
    return weights[0] * cross_entropy(logits, own) + weights[1] * cross_entropy(logits.T, own)


def inputs(size=7, dim=6, dtype=torch.float64):
    """Features with norms of about 0.1 to 3, a logit scale and a bias, all leaves."""
    norms = torch.rand(2, size, 1, dtype=dtype) * 3 + 0.1
    features = [functional.normalize(torch.randn(size, dim, dtype=dtype), dim=1) * n for n in norms]
    return [x.requires_grad_() for x in (*features, *torch.tensor([5.0, -3.0], dtype=dtype))]


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def assert_same(loss, expected, leaves):
    """Values and gradients."""
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found, wanted = gradients(loss, leaves), gradients(expected, leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("preset", EXPONENTS)
@pytest.mark.parametrize("labels", [None, torch.tensor([4, 9, 4, 0, 9, 4, 7])])
def test_presets_are_their_formula(preset, labels):
    """With one positive or several."""
    leaves = inputs()
    targets = None
    if labels is not None:
        same = (labels[:, None] == labels).double()
        targets = same / same.sum(dim=1, keepdim=True)
    loss = AsymmetricClipLoss.from_preset(preset)(*leaves, positives=labels)
    expected = formula(preset, *leaves, targets)
    assert_same(loss, expected, leaves)
    assert gradients(expected, leaves[:3])[2].abs() > 1e-3  # logit_scale is learned


@pytest.mark.parametrize("size", [2, 7, 600])  # 600: more than one tile of the kernel
@pytest.mark.parametrize("is_unit", [True, False], ids=["unit", "raw"])
def test_norm_sym_is_open_clips_loss(size, is_unit):
    leaves = inputs(size)
    unit = [functional.normalize(x, dim=1) for x in leaves[:2]]
    loss = AsymmetricClipLoss.from_preset("norm-sym")(
        *(unit if is_unit else leaves[:2]), *leaves[2:], output_dict=True
    )
    expected = open_clip.ClipLoss()(*unit, *leaves[2:], output_dict=True)
    assert loss.keys() == expected.keys()
    assert_same(loss["contrastive_loss"], expected["contrastive_loss"], leaves)
    assert gradients(loss["contrastive_loss"], leaves)[3] == 0


class OfColumns(nn.Module):
    def of_columns(self, columns):
        return columns[0].sum() - columns[1].sum()


def contrastive(embeddings):
    """Of a name that does not replace the loss."""
    return embeddings.var()


def test_regularizers():
    images, texts, scale, _ = inputs(dtype=torch.float32)
    criterion = AsymmetricClipLoss(regularizers=[(OfColumns(), 0.5), contrastive])
    losses = criterion(images, texts, scale, output_dict=True)
    plain, of_columns, spread = losses.values()
    torch.testing.assert_close(plain, AsymmetricClipLoss()(images, texts, scale))
    torch.testing.assert_close(of_columns, 0.5 * (images.sum() - texts.sum()))
    torch.testing.assert_close(spread, torch.cat([images, texts]).var())
    assert list(losses)[:2] == ["contrastive_loss", "of_columns_loss"]
    torch.testing.assert_close(criterion(images, texts, scale), plain + of_columns + spread)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_are_computed_in_float32(dtype):
    images, texts, scale, _ = inputs(40, 32, dtype=torch.float32)
    loss = AsymmetricClipLoss.from_preset("nonorm-i2t")
    reference = loss(images.to(dtype).double(), texts.to(dtype).double(), scale)
    half = [x.to(dtype) for x in (images, texts, scale[None])]
    found = loss(*half, positives=torch.arange(40))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = loss(images, texts, scale, positives=torch.arange(40))
    torch.testing.assert_close(under_autocast, loss(images, texts, scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", [p for p in PRESETS if p != "norm-sym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_norm_1_are_refused_where_the_norm_is_learned(preset, dtype):
    images, texts, scale, _ = inputs(dtype=torch.float64)
    raw = [x.to(dtype) for x in (images, texts)]
    unit = [functional.normalize(x, dim=1).to(dtype) for x in (images, texts)]
    criterion = AsymmetricClipLoss.from_preset(preset)
    for side, gamma in enumerate(EXPONENTS[preset][0]):
        mixed = [unit[i] if i == side else raw[i] for i in (0, 1)]
        if gamma == 0:
            match = rf"norms of {('image', 'text')[side]} features.*stm\.clip\.unnormalize\(model\)"
            with pytest.raises(ValueError, match=match):  # an error does not count as the look
                criterion(*mixed, scale)
    criterion(*raw, scale)
    criterion(*unit, scale)  # it looks once
    # a single norm that rounding does not explain
    for x in unit:
        x[0] *= 1.001 if dtype == torch.float32 else 1.05
    AsymmetricClipLoss.from_preset(preset)(*unit, scale)


CASES = [
    *((preset, "plain") for preset in PRESETS),
    *((preset, "labels") for preset in ("norm-sym", "imgnorm-i2t", "nonorm-t2i")),
    ("imgnorm-i2t", "sigreg"),
]
SIZE = 5  # a rank
LABELS = torch.tensor([0, 1, 2, 1, 3, 2, 4, 2, 5, 0])  # of which some are on both ranks


class Towers(nn.Module):
    """Two linear towers with the outputs of an open_clip model."""

    def __init__(self):
        super().__init__()
        self.visual, self.text = nn.Linear(6, 4), nn.Linear(3, 4)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(1.2)), None

    def forward(self, images, texts):
        out = {"image_features": self.visual(images), "text_features": self.text(texts)}
        return out | {"logit_scale": self.logit_scale.exp()}


def model_and_batch():
    """The same on every rank: the model, and the joined batch."""
    torch.manual_seed(1)
    model = Towers().double()
    for parameter in (*model.visual.parameters(), *model.text.parameters()):
        nn.init.normal_(parameter)
    return model, *(torch.randn(2 * SIZE, d, dtype=torch.float64) for d in (6, 3))


def step(case, model, images, texts, labels, seed=0, **options):
    """Loss and gradients of a batch."""
    preset, extra = case
    regularizers = [(stm.SIGReg(num_directions=64), 0.3)] if extra == "sigreg" else []
    criterion = AsymmetricClipLoss.from_preset(preset, regularizers=regularizers, **options)
    for _ in range(2):  # the second is refused by DDP if the first left a gradient out
        model.zero_grad()
        out = model(images, texts)
        torch.manual_seed(seed)
        loss = criterion(**out, positives=labels if extra == "labels" else None)
        loss.backward()
    names = (name.removeprefix("module.") for name, _ in model.named_parameters())
    return loss.item(), dict(zip(names, (p.grad for p in model.parameters()), strict=True))


def all_cases():
    """With another seed on each rank: the directions of SIGReg are those of rank 0."""
    rank = dist.get_rank()
    found = {}
    for case in CASES:
        model, *batch = model_and_batch()
        own = [x[rank * SIZE : (rank + 1) * SIZE] for x in (*batch, LABELS)]
        parallel = DistributedDataParallel(model)
        found[case] = step(case, parallel, *own, seed=rank, gather_across_devices=True)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return on_ranks(2, all_cases)


@needs_fork
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_two_ranks_are_one_process_on_the_joined_batch(two_ranks, case):
    expected, wanted = step(case, *model_and_batch(), LABELS)
    losses, gradients = zip(*(results[case] for results in two_ranks), strict=True)
    assert sum(losses) / 2 == pytest.approx(expected, rel=1e-10)
    assert losses[0] != losses[1]
    assert all(gradient.abs().max() > 0 for gradient in wanted.values())
    for found in gradients:
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-12)


def refused_on_this_rank(sizes, scale):
    """Whether a batch of a size on each rank, with norms of 1 where the scale is 1, is refused."""
    rank = dist.get_rank()
    images = functional.normalize(torch.randn(sizes[rank], 4), dim=1) * scale[rank]
    criterion = AsymmetricClipLoss.from_preset("nonorm-sym", gather_across_devices=True)
    try:
        criterion(images, images, 5.0)
    except (RuntimeError, ValueError):
        return True
    return False


@needs_fork
@pytest.mark.parametrize(
    ("sizes", "scale", "refused"),
    [((5, 5), (2.0, 2.0), False), ((5, 3), (2.0, 2.0), True), ((5, 5), (2.0, 1.0), True)],
    ids=["fine", "unequal sizes", "norms of 1 on one rank"],
)
def test_a_batch_is_refused_on_all_ranks(sizes, scale, refused):
    assert on_ranks(2, refused_on_this_rank, sizes, scale) == [refused, refused]
