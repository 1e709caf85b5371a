"""Models whose embeddings can be read off: of a table that a test writes, or counts of words."""

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers


def tokenizer_of(words) -> Tokenizer:
    """The id of a word is its place, from 1 on; all others are 0."""
    places = {word: i for i, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def bag(words, *more, similarity="dot") -> SentenceTransformer:
    """A model that counts these words, with further modules."""
    modules = [BoW(list(words)), *more]
    return SentenceTransformer(modules=modules, similarity_fn_name=similarity, device="cpu")


def lookup(queries, documents, similarity_fn_name="dot") -> SentenceTransformer:
    """A model that gives "q0", ..., "d000", ... these embeddings, (n, D) and (m, D)."""
    rows = np.concatenate([np.zeros((1, len(queries[0]))), queries, documents]).astype(np.float32)
    ids = [f"q{i}" for i in range(len(queries))] + [f"d{j:03}" for j in range(len(documents))]
    module = StaticEmbedding(tokenizer_of(ids), embedding_weights=torch.from_numpy(rows))
    options = {"similarity_fn_name": similarity_fn_name, "device": "cpu"}
    return SentenceTransformer(modules=[module], **options)


def judged(num_queries, num_documents, relevant) -> dict[str, dict]:
    """Queries, corpus (not in id order) and relevant_docs, from the columns of each query."""
    return {
        "queries": {f"q{i}": f"q{i}" for i in range(num_queries)},
        "corpus": {f"d{j:03}": f"d{j:03}" for j in reversed(range(num_documents))},
        "relevant_docs": {
            f"q{i}": {f"d{j:03}" for j in columns} for i, columns in enumerate(relevant)
        },
    }
