"""Language models and decoder retrievers: loading them, and LoRA for both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from st_magnitude._checks import needs
from st_magnitude._upstream import forget_adapter

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

__all__ = ["add_lora", "check_name", "load_lm", "load_retriever", "lora_config", "merge_lora", "tokenizer_of"]

_FILES = ("config.json", "modules.json")  # a model has one of these, or both

LORA: dict[str, Any] = {
    "r": 256,
    "lora_alpha": 64,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def lora_config(**overrides: Any) -> LoraConfig:
    """The paper's LoRA (section 4.1 and the reference implementation).

    It has r = 256, alpha = 64 and dropout 0.1, on all projections of attention and feed-forward layers.

    Args:
        overrides: Other arguments of ``peft.LoraConfig``.
    """
    with needs("LoRA", "revela"):
        from peft import LoraConfig
    return LoraConfig(**(LORA | overrides))


def add_lora(model: nn.Module, config: LoraConfig | None = None) -> nn.Module:
    """Freezes a model and adds low-rank matrices to train.

    A language model gets peft's wrapper. A SentenceTransformer gets an adapter in place, which is saved as such;
    :func:`merge_lora` writes it into the weights.

    Args:
        model: A language model or a SentenceTransformer.
        config: Configuration of the LoRA; by default :func:`lora_config`.

    Raises:
        ValueError: If the model has a LoRA already, or none of its modules is a target.
    """
    config = copy.copy(config) if config else lora_config()  # peft writes the name of the base model into it
    from peft import PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ValueError("This model already has a LoRA; pass it without another one.")
    targets = config.target_modules
    if isinstance(targets, (list, set)):
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        if not names & set(targets):
            linear = {n.rsplit(".", 1)[-1] for n, part in model.named_modules() if isinstance(part, nn.Linear)}
            raise ValueError(
                f"None of the LoRA targets {sorted(targets)} is in {type(model).__name__}, whose linear layers are "
                f"{sorted(linear)}; choose among them: lora_config(target_modules=[...])."
            )
    if isinstance(model, SentenceTransformer):
        model.add_adapter(config)
        return model
    return get_peft_model(model, config)


def merge_lora(model: SentenceTransformer | PeftModel) -> Any:
    """Writes a LoRA into the weights, in place, and returns the plain model; its outputs are the same without peft."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model, PeftModel):
        return model.merge_and_unload()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            forget_adapter(part)
    return model


def load_lm(name: str | Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal decoder in float32 and its tokenizer.

    Args:
        name: A name on the hub, a folder, or a GGUF file, whose weights are dequantised (package ``gguf``; this takes a
            while). A folder with exactly one ``.gguf`` file and no ``config.json`` counts as that file.
        options: Arguments of ``from_pretrained``; ``dtype`` is torch.float32 by default, so that autocast decides.

    Raises:
        OSError: If there is no such model, or a folder holds several GGUF files.
        ImportError: If the model is a GGUF file and the package gguf is not installed.
    """
    options = {"dtype": torch.float32} | options
    path = Path(name)
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if path.suffix == ".gguf":
        files = [path]
    if len(files) > 1:
        raise OSError(f"{path} holds {len(files)} GGUF files; pass one of {[file.name for file in files]}.")
    if not files:
        with _naming("language model", name):
            return AutoModelForCausalLM.from_pretrained(str(name), **options), AutoTokenizer.from_pretrained(str(name))
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{files[0].name} is a GGUF file; to read it, run: pip install gguf.") from error
    folder, file = str(files[0].parent), files[0].name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, **options)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are no longer quantised, and could not be saved with it
    model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    model.config.name_or_path = str(files[0])
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)


def load_retriever(name: str | Path, max_length: int = 160) -> SentenceTransformer:
    """Loads a SentenceTransformer, or makes one of a bare decoder as the paper does.

    A decoder gets an end-of-text token after each text, whose state is the embedding (section 4.1, as in RepLLaMA).

    Args:
        name: A name on the hub or a folder.
        max_length: Largest number of tokens of a text, for a bare decoder.

    Raises:
        OSError: If there is no such model.
        ValueError: If the tokenizer of a bare decoder has no end-of-text token.
    """
    path = str(name)
    with _naming("retriever", name):
        if is_sentence_transformer_model(path):
            return SentenceTransformer(path)
        config = AutoConfig.from_pretrained(path)
    if not any(architecture.endswith("ForCausalLM") for architecture in config.architectures or []):
        return SentenceTransformer(path)
    transformer = Transformer(path, max_seq_length=max_length)
    _end_texts(transformer.tokenizer)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "lasttoken")])


def tokenizer_of(lm: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that is saved beside a language model."""
    name = getattr(lm, "name_or_path", "") or getattr(getattr(lm, "config", None), "name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(
            f"No tokenizer for the language model could be loaded from {name!r}; pass lm_tokenizer=..."
        ) from error


def check_name(what: str, name: str | Path) -> None:
    """Refuses a model that is neither a folder, nor in the hub's cache, nor on the hub.

    A hub that cannot be reached is asked once: loading would ask it for several files, each five times in 20 seconds.

    Args:
        what: The model's role, for the message.
        name: Folder or hub id.

    Raises:
        OSError: If there is no such model.
    """
    if Path(name).exists():
        return
    problem: Exception | None = None
    # sentence-transformers looks for its own models under their short names, too
    for candidate in (str(name), f"sentence-transformers/{name}"):
        try:
            if any(isinstance(try_to_load_from_cache(candidate, file), str) for file in _FILES):
                return
            model_info(candidate, timeout=10)
            return
        except Exception as error:  # no valid id, no such model, no access, offline, no connection
            problem = problem or error
    raise _not_loaded(what, name, f"it is no folder here, and the hub does not have it ({problem})") from problem


@contextmanager
def _naming(what: str, name: str | Path) -> Iterator[None]:
    check_name(what, name)
    try:
        yield
    except OSError as error:
        raise _not_loaded(what, name, str(error)) from error


def _not_loaded(what: str, name: str | Path, why: str) -> OSError:
    why = " ".join(why.split()).rstrip(".")
    return OSError(
        f"The {what} {str(name)!r} could not be loaded: {why}. Give a folder with config.json and weights, or the name "
        "of a model on a hub that can be reached from here."
    )


def _end_texts(tokenizer: Any) -> None:
    """Makes the tokenizer append its end-of-text token, so that this is saved and truncation leaves room for it."""
    if tokenizer.eos_token is None:
        raise ValueError("The decoder's tokenizer has no end-of-text token, whose state would be the embedding.")
    if tokenizer("x")["input_ids"][-1] == tokenizer.eos_token_id:
        return
    end = TemplateProcessing(
        single=f"$A:0 {tokenizer.eos_token}:0",
        pair=f"$A:0 {tokenizer.eos_token}:0 $B:1 {tokenizer.eos_token}:1",
        special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)],
    )
    core = tokenizer.backend_tokenizer
    core.post_processor = Processors([core.post_processor, end]) if core.post_processor else end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
