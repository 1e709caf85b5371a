"""The static table of the PyPI package wordllama, a model that needs no hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from st_magnitude._checks import INSTALL, MissingPackage

TABLE = "wordllama"


def load_table(device: str | None = None) -> SentenceTransformer:
    """A StaticEmbedding of 32,000 tokens x 256 dimensions; a text vector is a mean of tokens."""
    spec = find_spec(TABLE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(
            f'The table {TABLE!r} comes with a package of its name. Install it {INSTALL} ".[table]"'
            ", or name another model: a folder, or a hub id such as"
            " sentence-transformers/static-retrieval-mrl-en-v1."
        )
    folder = Path(spec.submodule_search_locations[0])
    weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
    file = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    table = StaticEmbedding(Tokenizer.from_file(str(file)), embedding_weights=weights.float())
    return SentenceTransformer(modules=[table], device=device)
