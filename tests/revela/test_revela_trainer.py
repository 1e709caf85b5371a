"""RevelaTrainer: what is trained, saved, resumed, clipped and kept together."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _ranks import needs_fork, on_ranks
from _tiny import load_transformer, save_decoder
from datasets import Dataset
from peft import LoraConfig
from revela_tiny import arguments, groups, language_model, loss_for, retriever
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import AutoModelForCausalLM, TrainerCallback

import st_magnitude as stm
from st_magnitude.revela import RevelaLoss, RevelaTrainer, load_retriever
from st_magnitude.revela.attention import base_model

LORA = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])


def trainer_for(
    folder: Path, lm_lora: object = LORA, kind: type = RevelaTrainer, **options: object
) -> RevelaTrainer:
    """Options of the trainer by name; all others are training arguments."""
    torch.manual_seed(0)
    given = {"train_dataset": groups(), "retriever_lora": None, "lm_lora": lm_lora}
    names = {"retriever_lora", "lm_learning_rate", "train_dataset", "eval_dataset"}
    of_trainer = names & options.keys()
    given |= {name: options.pop(name) for name in of_trainer}
    model = retriever(folder / "retriever")
    return kind(model, arguments(folder / "out", **options), loss=loss_for(model), **given)


def weights(trainer: RevelaTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.loss.named_parameters()}


def moved(trainer: RevelaTrainer) -> tuple[set[str], set[str]]:
    """The parameters of the retriever and those of the language model that training changes."""
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    names = {name for name, value in after.items() if not torch.equal(value, before[name])}
    lm = {name for name in names if name.startswith("lm.")}
    return names - lm, lm


@pytest.mark.parametrize("retriever_lora", ["paper", None])
def test_trains_both_and_only_lora_of_the_language_model(tmp_path, retriever_lora) -> None:
    trainer = trainer_for(tmp_path, retriever_lora=retriever_lora)
    of_retriever, of_lm = moved(trainer)
    assert of_retriever
    assert all("lora_" in name for name in of_retriever) == (retriever_lora is not None)
    adapter = {name for name in weights(trainer) if "lora_" in name}
    assert of_lm == {name for name in adapter if name.startswith("lm.")}
    assert len(of_lm) == 8
    logged = trainer.state.log_history[0]
    assert logged["next_token"] == pytest.approx(logged["loss"], abs=1e-3)
    assert logged["lm_grad_norm"] > 0
    assert logged["grad_norm"] > 0
    of_retriever, of_lm = moved(trainer_for(tmp_path / "still", lm_learning_rate=0.0))
    assert of_retriever
    assert not of_lm


def test_the_language_model_is_clipped(tmp_path) -> None:
    trainer = trainer_for(tmp_path, max_grad_norm=1e-3, lm_lora=None, max_steps=1)
    norms: list[float] = []

    class Look(TrainerCallback):
        def on_optimizer_step(self, *_: object, **__: object) -> None:
            gradients = [p.grad.norm() for p in trainer.lm_parameters().values()]
            norms.append(torch.stack(gradients).norm().item())

    trainer.add_callback(Look())
    trainer.train()
    assert norms == pytest.approx([1e-3], rel=1e-2)
    assert trainer.state.log_history[0]["lm_grad_norm"] > 1e-2


@pytest.mark.parametrize("lm_lora", [LORA, None])
def test_resumed_is_uninterrupted(tmp_path, lm_lora: object) -> None:
    """Weights of both models after 6 steps, and after 3, new objects, and 3 more."""
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    settings |= {"gradient_accumulation_steps": 2}
    whole = trainer_for(tmp_path / "a", lm_lora, **settings)
    whole.train()
    checkpoint = tmp_path / "a" / "out" / "checkpoint-3"
    assert (checkpoint / "language_model.safetensors").exists()
    resumed = trainer_for(tmp_path / "b", lm_lora, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=1e-7)


def test_checkpoints_of_another_kind_are_refused(tmp_path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer_for(tmp_path, **settings).train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    with pytest.raises(ValueError, match="same language model and lm_lora"):
        trainer_for(tmp_path, None, **settings).train(resume_from_checkpoint=True)
    (checkpoint / "language_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"language_model\.safetensors"):
        trainer_for(tmp_path, **settings).train(resume_from_checkpoint=str(checkpoint))


def test_streaming(tmp_path) -> None:
    trainer = trainer_for(tmp_path, train_dataset=groups().to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.args.accelerator_config.dispatch_batches is False


@pytest.mark.parametrize("lm_lora", [LORA, None])
def test_gradient_checkpointing_changes_nothing(tmp_path, lm_lora: object) -> None:
    one, other = (
        trainer_for(tmp_path / str(on), lm_lora, gradient_checkpointing=on, max_steps=2)
        for on in (False, True)
    )
    calls: list[int] = []
    layer = base_model(other.loss.lm).model.layers[0]
    layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    for trainer in (one, other):
        torch.manual_seed(1)
        trainer.train()
    assert len(calls) == 4  # twice a step: it was recomputed
    torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=1e-6)


def test_bfloat16_reaches_both_models(tmp_path) -> None:
    """In training and evaluation."""
    seen: set[tuple] = set()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "bf16": True}
    trainer = trainer_for(tmp_path, eval_dataset=groups().select(range(4)), **settings)
    layers = [module for module in trainer.loss.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda m, _, y: seen.add((m, m.training, y.dtype)))
    trainer.train()
    assert seen == {(m, mode, torch.bfloat16) for m in layers for mode in (True, False)}
    evaluated = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluated["eval_next_token"] == pytest.approx(evaluated["eval_loss"], abs=1e-3)
    assert {"eval_reading_gain", "eval_choice_gain"} <= evaluated.keys()


@pytest.mark.parametrize("is_encoder", [True, False])
def test_the_papers_lora_fits_any_architecture(tmp_path, is_encoder) -> None:
    """DistilBERT names its layers otherwise than Llama does. Both are loaded in float32."""
    path = str(tmp_path / "encoder") if is_encoder else save_decoder(tmp_path / "decoder")
    stored = retriever(tmp_path) if is_encoder else AutoModelForCausalLM.from_pretrained(path)
    stored.to(torch.bfloat16).save_pretrained(path)
    model = load_retriever(path)
    assert next(model.parameters()).dtype == torch.float32
    loss = loss_for(model)
    RevelaTrainer(model, arguments(tmp_path), loss=loss)
    adapters = [model[0].model.peft_config, loss.lm.peft_config]
    assert [(x["default"].r, x["default"].lora_alpha) for x in adapters] == [(256, 64)] * 2
    places = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    layers = {place.rpartition(".")[2] for place in places}
    expected = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
    if is_encoder:
        expected = "q_lin k_lin v_lin out_lin lin1 lin2"
    assert layers == set(expected.split())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_has_an_adapter_or_is_frozen_does_not_change(tmp_path, is_frozen) -> None:
    model = retriever(tmp_path / "retriever")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_lin"]))
    loss = loss_for(model)
    if is_frozen:
        loss.lm.requires_grad_(False)
    else:
        loss.lm.add_adapter(LORA)
    names = [name for name, _ in loss.named_parameters()]
    RevelaTrainer(model, arguments(tmp_path), loss=loss)
    assert [name for name, _ in loss.named_parameters()] == names


def test_a_decoder_embeds_the_end_of_text(tmp_path) -> None:
    folder = save_decoder(tmp_path / "decoder", seed=3)
    model = load_retriever(folder, max_length=6)
    text = "how long does green tea steep in the water of a pot"
    ids = model.preprocess([text])["input_ids"][0].tolist()
    assert ids[-1] == model.tokenizer.convert_tokens_to_ids("[EOS]")
    assert len(ids) <= 6
    lm = AutoModelForCausalLM.from_pretrained(folder)
    ids = model.preprocess(["green tea"])["input_ids"]
    with torch.no_grad():
        state = lm.model(ids).last_hidden_state[0, -1]
    both = model.encode(["green tea", "how long does tea steep"])  # padding is invisible
    np.testing.assert_allclose(both[0], state.numpy(), atol=1e-5)
    model.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"))
    np.testing.assert_allclose(again.encode("green tea"), state, atol=1e-5)


def test_what_would_train_wrongly_is_refused(tmp_path, static_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"\['anchor'\].*build_groups"):
        trainer_for(tmp_path, train_dataset=Dataset.from_dict({"anchor": ["a", "b"]})).train()
    loss = loss_for(retriever(tmp_path / "a"))
    with pytest.raises(ValueError, match="another model"):
        RevelaTrainer(model=retriever(tmp_path / "b"), loss=loss, train_dataset=groups())
    table = stm.load(static_path, device="cpu")
    with pytest.raises(ValueError, match="retriever_lora=None"):
        RevelaTrainer(model=table, loss=loss_for(table), train_dataset=groups())
    with pytest.raises(ValueError, match="split_batches"):
        trainer_for(tmp_path, accelerator_config={"split_batches": True})
    name = "st_magnitude.revela.trainer.engine_of_trainer"
    monkeypatch.setattr(name, lambda trainer: "DeepSpeed ZeRO-2")
    with pytest.raises(ValueError, match="DeepSpeed"):
        trainer_for(tmp_path)


class InOrder(RevelaTrainer):
    def get_batch_sampler(self, dataset, batch_size, drop_last, **kwargs):
        return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def three_steps(folder: str, output: Path, **options: object) -> dict[str, Tensor]:
    """All weights, after one group of documents at a time; each rank begins with other weights of
    the language model, of which those of rank 0 count.
    """
    seed = dist.get_rank() if dist.is_initialized() else 0
    model = load_transformer(folder)
    loss = RevelaLoss(model, *language_model(seed))
    options |= {"per_device_train_batch_size": 1, "max_grad_norm": 0.05, "max_steps": 3}
    args = arguments(output / f"{seed}", **options)
    of_lm = {"retriever_lora": None, "lm_lora": None, "lm_learning_rate": 5e-3}
    trainer = InOrder(model, args, loss=loss, train_dataset=groups(3), **of_lm)
    trainer.train()
    return {name.replace("model.module", "model"): x for name, x in weights(trainer).items()}


@pytest.mark.slow
@needs_fork
def test_two_processes_keep_one_language_model(folder, tmp_path) -> None:
    """Two gloo processes, a group each, end as one process that accumulates two groups a step."""
    first, second = on_ranks(2, partial(three_steps, ddp_backend="gloo"), folder, tmp_path)
    alone = three_steps(folder, tmp_path / "alone", gradient_accumulation_steps=2)
    started = dict(language_model(0)[0].named_parameters())
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone, rtol=0, atol=2e-5)
    assert max((alone[f"lm.{name}"] - value).abs().max() for name, value in started.items()) > 5e-3
