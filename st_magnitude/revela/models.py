"""Retrievers for Revela."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from st_magnitude.saving.export import loading


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
