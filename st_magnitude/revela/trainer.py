"""Retrievers for Revela, and RevelaTrainer, which trains one with a language model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file, save_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import (
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from st_magnitude._distributed import engine_of_trainer
from st_magnitude.revela.attention import base_model
from st_magnitude.saving.export import loading
from st_magnitude.surgery.adapters import has_adapter, lora_config

if TYPE_CHECKING:
    from peft import LoraConfig

    from st_magnitude.revela.loss import RevelaLoss

LM_FILE = "language_model.safetensors"


def load_retriever(name: str | Path, max_length: int = 160) -> SentenceTransformer:
    """Loads a SentenceTransformer, or makes one of a bare decoder as the paper does.

    A decoder gets an end-of-text token after each text, whose state is the embedding (section 4.1,
    as in RepLLaMA), and reads at most ``max_length`` tokens. Weights are cast to float32.

    Raises:
        OSError: If there is no such model.
        ValueError: If the tokenizer of a bare decoder has no end-of-text token.
    """
    path = str(name)
    with loading("retriever", path):
        names: list[str] = []
        if not is_sentence_transformer_model(path):
            # without trust_remote_code=False, transformers asks at the terminal
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            names = config.architectures or []
        if not any(name.endswith("ForCausalLM") for name in names):
            return SentenceTransformer(path).float()
        decoder = Transformer(path, max_seq_length=max_length)
    _end_texts(decoder.tokenizer)
    pooling = Pooling(decoder.get_embedding_dimension(), "lasttoken")
    return SentenceTransformer(modules=[decoder, pooling]).float()


def _end_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the tokenizer append and count its end-of-text token, also when it is loaded again."""
    if tokenizer.eos_token is None:
        raise ValueError(
            "The decoder's tokenizer has no end-of-text token, whose state would be the embedding."
        )
    if tokenizer("x")["input_ids"][-1] == tokenizer.eos_token_id:
        return
    special = [(tokenizer.eos_token, tokenizer.eos_token_id)]
    end = TemplateProcessing(single=f"$A:0 {tokenizer.eos_token}:0", special_tokens=special)
    core = tokenizer.backend_tokenizer
    core.post_processor = Processors([core.post_processor, end]) if core.post_processor else end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


class RevelaTrainer(SentenceTransformerTrainer):
    """sentence-transformers' Trainer for :class:`~st_magnitude.revela.RevelaLoss`.

    It optimises the language model with the retriever: at a separate learning rate, with gradients
    averaged over processes and clipped at ``max_grad_norm`` apart from the retriever's. Checkpoints
    hold what is trained of it. The result is the retriever alone, a SentenceTransformer with a
    LoRA, which :func:`~st_magnitude.export` merges.

    Args:
        args: Training arguments. ``gradient_checkpointing`` applies to both models.
        train_dataset: Groups from :func:`~st_magnitude.revela.build_groups`; the batch size counts
            groups.
        retriever_lora: LoRA of the retriever: ``"paper"`` for :func:`lora_config`, a
            ``peft.LoraConfig``, or None to train the parameters that require gradients already. A
            model that comes with an adapter does not change, nor does a frozen language model.
        lm_lora: LoRA of the language model, in the same forms.
        lm_learning_rate: Learning rate of the language model; by default the retriever's.
        kwargs: All other arguments of SentenceTransformerTrainer, such as ``eval_dataset``.

    Raises:
        ValueError: If the loss has another retriever, a retriever without a transformer is to get a
            LoRA, batches would be split among processes, the Trainer uses FSDP or DeepSpeed, a row
            is not a group, or a resumed run trains other parameters.
        FileNotFoundError: When resuming, if the checkpoint has no language model.
    """

    loss: RevelaLoss  # type: ignore[assignment]
    lm_grad_norm: Tensor | None = None  # in the last step

    def __init__(
        self,
        model: SentenceTransformer,
        args: SentenceTransformerTrainingArguments | None = None,
        *,
        loss: RevelaLoss,
        train_dataset: Dataset | IterableDataset | None = None,
        retriever_lora: LoraConfig | Literal["paper"] | None = "paper",
        lm_lora: LoraConfig | Literal["paper"] | None = "paper",
        lm_learning_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        if loss.model is not model:
            raise ValueError("The loss was built for another model; build it with this one.")
        settings: Any = copy.copy(args) or SentenceTransformerTrainingArguments("revela")
        if retriever_lora is not None and not has_adapter(model):
            if not any(isinstance(part, PreTrainedModel) for part in model.modules()):
                raise ValueError("This retriever is no transformer: pass retriever_lora=None.")
            model.add_adapter(_chosen(retriever_lora))
        if any(parameter.requires_grad for parameter in loss.lm.parameters()):
            if lm_lora is not None and not has_adapter(loss.lm):
                from peft import get_peft_model

                loss.lm = get_peft_model(loss.lm, _chosen(lm_lora))
            if lm_learning_rate is not None:
                rates = settings.learning_rate_mapping or {}
                settings.learning_rate_mapping = {r"^lm\.": lm_learning_rate} | rates
        if settings.gradient_checkpointing:
            base_model(loss.lm).gradient_checkpointing_enable({"use_reentrant": False})
        settings.accelerator_config = loading = copy.copy(settings.accelerator_config)
        if loading.split_batches:
            raise ValueError("accelerator_config.split_batches would cut groups apart.")
        if isinstance(train_dataset, IterableDataset):
            loading.dispatch_batches = False  # True would cut groups apart
        kwargs.setdefault("data_collator", loss.collator)
        super().__init__(
            model=model, args=settings, loss=loss, train_dataset=train_dataset, **kwargs
        )
        if engine := engine_of_trainer(self):
            raise ValueError(
                f"{engine} trains one model and would leave the language model out. Use "
                f"DistributedDataParallel (torchrun, without {engine.split()[0]})."
            )
        self.add_callback(_LanguageModelCallback(self))

    def lm_parameters(self) -> dict[str, nn.Parameter]:
        parameters = self.loss.lm.named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, dict[str, Any]]:
        with self.accelerator.autocast():  # accelerate does this for the retriever only
            result = super().compute_loss(*args, **kwargs)
        self.track_loss_components(self.loss.logs)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Also averages the language model's gradients over processes, once per update."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients and self.args.world_size > 1:
            for parameter in self.lm_parameters().values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.args.world_size
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" in logs and self.lm_grad_norm is not None:
            logs = {**logs, "lm_grad_norm": float(self.lm_grad_norm)}
        super().log(logs, start_time)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir or "")
        if folder:
            self.load_lm_checkpoint(folder)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def load_lm_checkpoint(self, checkpoint: str | Path) -> None:
        """Loads the trained parameters of the language model, as :meth:`train` does to resume."""
        if not (parameters := self.lm_parameters()):
            return
        saved = load_file(Path(checkpoint) / LM_FILE)
        if differing := sorted(saved.keys() ^ parameters.keys()):
            raise ValueError(
                f"{checkpoint} holds other parameters than are trained now ({len(differing)}, such "
                f"as {differing[0]!r}); use the same language model and lm_lora as before."
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


def _chosen(lora: LoraConfig | Literal["paper"]) -> LoraConfig:
    """A copy, because peft writes the name of the base model into it."""
    return lora_config() if lora == "paper" else copy.copy(lora)


class _LanguageModelCallback(TrainerCallback):
    """Does for the language model what the Trainer does for its model."""

    def __init__(self, trainer: RevelaTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        if args.world_size > 1:
            with torch.no_grad():
                for parameter in self.trainer.lm_parameters().values():
                    dist.broadcast(parameter, 0)

    def on_pre_optimizer_step(self, args: TrainingArguments, *_: object, **__: object) -> None:
        limit = args.max_grad_norm if args.max_grad_norm > 0 else float("inf")
        if parameters := list(self.trainer.lm_parameters().values()):
            self.trainer.lm_grad_norm = clip_grad_norm_(parameters, limit)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        parameters = self.trainer.lm_parameters()
        if args.should_save and parameters and not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            weights = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            save_file(weights, str(folder / LM_FILE))
