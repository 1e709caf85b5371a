"""Each of two gloo processes for test_clip_loss.py runs this: `torchrun --nproc_per_node 2 _two_ranks_clip.py OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm

PRESETS = ["norm-sym", "nonorm-sym", "imgnorm-i2t", "nonorm-i2t", "txtnorm-t2i", "nonorm-t2i"]
CASES = [
    *((preset, "plain") for preset in PRESETS),
    *((preset, "labels") for preset in ("norm-sym", "imgnorm-i2t", "nonorm-t2i")),
    ("imgnorm-i2t", "sigreg"),
]
SIZE = 5  # a rank


class Towers(nn.Module):
    """Two linear towers with the outputs of an open_clip model."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = nn.Linear(6, 4), nn.Linear(3, 4)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(1.2)), None

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        out = {"image_features": self.visual(images), "text_features": self.text(texts)}
        return out | {"logit_scale": self.logit_scale.exp()}


def features() -> tuple[Towers, Tensor, Tensor, Tensor]:
    """The model and the joined batch, and labels of which some are on both ranks."""
    generator = torch.Generator().manual_seed(1)
    model = Towers().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    images, texts = (torch.randn(2 * SIZE, d, generator=generator, dtype=torch.float64) for d in (6, 3))
    return model, images, texts, torch.tensor([0, 1, 2, 1, 3, 2, 4, 2, 5, 0])


def regularizer() -> tuple[stm.SIGReg, float]:
    return stm.SIGReg(num_directions=64), 0.3


def one_step(loss: nn.Module, normalised: bool = False, with_labels: bool = False) -> dict:
    """Loss and gradients of this rank's part of the batch."""
    model, images, texts, labels = features()
    parallel = DistributedDataParallel(model)
    own = slice(dist.get_rank() * SIZE, (dist.get_rank() + 1) * SIZE)
    arguments = {"positives": labels[own]} if with_labels else {}
    for _ in range(2):  # the second is refused by DDP if the first left a gradient out
        model.zero_grad()
        out = parallel(images[own], texts[own])
        if normalised:
            out = {k: functional.normalize(x, dim=1) if k.endswith("features") else x for k, x in out.items()}
        torch.manual_seed(dist.get_rank())  # the directions of SIGReg are nevertheless those of rank 0
        value = loss(**out, **arguments)
        value.backward()
    return {"loss": value.item(), "gradients": {name: p.grad for name, p in model.named_parameters()}}


def main(output: Path) -> None:
    from open_clip import ClipLoss

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for case in CASES:
        preset, extra = case
        options = {"regularizers": [regularizer()]} if extra == "sigreg" else {}
        loss = stm.clip.AsymmetricClipLoss.from_preset(preset, gather_across_devices=True, **options)
        results[case] = one_step(loss, with_labels=extra == "labels")
    stock = ClipLoss(local_loss=True, gather_with_grad=True, rank=dist.get_rank(), world_size=2)
    results["stock"] = one_step(stock, normalised=True)
    torch.save(results, output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
