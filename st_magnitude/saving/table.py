"""The static table of the PyPI package wordllama, a model that needs no hub."""

from __future__ import annotations

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from st_magnitude.saving.find import folder_of_table


def load_table(device: str | None = None) -> SentenceTransformer:
    """A StaticEmbedding of 32,000 tokens x 256 dimensions; a text vector is a mean of tokens."""
    folder = folder_of_table()
    weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
    file = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    table = StaticEmbedding(Tokenizer.from_file(str(file)), embedding_weights=weights.float())
    return SentenceTransformer(modules=[table], device=device)
