"""The work of each of two gloo processes for test_revela_trainer.py."""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from revela_tiny import arguments, groups, language_model, retriever
from torch.utils.data import BatchSampler, SequentialSampler

from st_magnitude.revela import RevelaLoss, RevelaTrainer


class InOrder(RevelaTrainer):
    def get_batch_sampler(self, dataset, batch_size, drop_last, **kwargs):
        return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def run(folder: Path, seed: int, **options: object) -> dict[str, torch.Tensor]:
    """All weights after three steps, one group of documents at a time."""
    model = retriever(folder / "retriever")
    lm, tokens = language_model(seed)
    loss = RevelaLoss(model, lm, tokens)
    args = arguments(
        folder / "out", per_device_train_batch_size=1, max_grad_norm=0.05, max_steps=3, **options
    )
    of_lm = {"lm_lora": None, "lm_learning_rate": 5e-3}
    InOrder(model, args, loss=loss, train_dataset=groups(3), **of_lm).train()
    weights = {f"model.{name}": value for name, value in model.named_parameters()}
    weights |= {f"lm.{name}": value for name, value in loss.lm.named_parameters()}
    return {name: value.detach().clone() for name, value in weights.items()}


if __name__ == "__main__":
    output = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    # other weights of the language model on each rank at first: rank 0's weights count
    torch.save(
        run(output / f"rank{rank}", seed=rank, ddp_backend="gloo"), output / f"rank{rank}.pt"
    )
    gc.collect()  # of trainers, which hold the group: its threads must end before Python does
    dist.destroy_process_group()
