"""What each of two gloo processes of test_training.py does: torchrun _two_ranks.py IN OUT."""

import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from _tiny import columns, load_transformer
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.losses import temp_agg_mrl


def arguments(output: Path, **options: Any) -> SentenceTransformerTrainingArguments:
    here = {"use_cpu": True, "ddp_backend": "gloo", "report_to": []}
    here |= {"save_strategy": "no", "disable_tqdm": True}
    return SentenceTransformerTrainingArguments(
        str(output / "trainer"), max_steps=3, per_device_train_batch_size=4, **here, **options
    )


def train(
    folder: str, output: Path, mini_batch_size: int | None, gather: bool | str = True
) -> dict[str, torch.Tensor]:
    """Everything that a loss can learn or leave out at once, in the Trainer."""
    model = load_transformer(folder)
    loss = stm.LearnableNormLoss(
        model,
        terms=temp_agg_mrl([8, 32], [0.05, 0.1]),
        margin=-0.1,
        margin_strategy="relative",
        regularizers=[(stm.SIGReg(num_directions=8), 0.01)],
        mini_batch_size=mini_batch_size,
        gather_across_devices=gather,
    )
    args = arguments(output, learning_rate=2e-5, weight_decay=0.1)
    data = Dataset.from_dict(columns(num_negatives=1))
    stm.attach(SentenceTransformerTrainer(model, args, data, loss=loss)).train()
    assert isinstance(loss.model, DistributedDataParallel)
    return {name: p.detach() for name, p in model.named_parameters()}


def main(folder: str, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict = {("trainer", size): train(folder, output, size) for size in (None, 3)}
    results["trainer", "ring"] = train(folder, output, 3, "ring")
    torch.save(results, output / f"rank{dist.get_rank()}.pt")
    gc.collect()  # of trainers, which hold the group: its threads must end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
