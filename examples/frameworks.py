"""A model whose norm counts, behind LangChain, LlamaIndex and Haystack: each keeps norms and
prompts, as `stm.check_serving` confirms.

    pip install langchain-huggingface       (or llama-index-embeddings-huggingface,
                                             or sentence-transformers-haystack)
    python examples/frameworks.py my-retriever langchain

The wrappers call `encode`, not `encode_query` and `encode_document`, so name the prompts, and load
the folder without `stm.load`, so save a model without its `ExponentNorm`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import st_magnitude as stm

Embed = Callable[[list[str], str], list[list[float]]]  # (texts, "query" or "document")


def langchain(folder: str) -> Embed:
    """Leave out `normalize_embeddings=True`, which many tutorials add. LangChain replaces every
    line break by a space."""
    from langchain_huggingface import HuggingFaceEmbeddings

    embeddings = HuggingFaceEmbeddings(
        model_name=folder,
        encode_kwargs={"prompt_name": "document"},
        query_encode_kwargs={"prompt_name": "query"},
    )

    def embed(texts: list[str], role: str) -> list[list[float]]:
        if role == "document":
            return embeddings.embed_documents(texts)
        return [embeddings.embed_query(text) for text in texts]

    return embed


def llama_index(folder: str) -> Embed:
    """Pass `normalize=False`, and both instructions: LlamaIndex ignores the prompts of the
    folder."""
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    prompts = stm.load(folder).prompts
    embedding = HuggingFaceEmbedding(
        folder,
        normalize=False,
        query_instruction=prompts["query"],
        text_instruction=prompts["document"],
    )

    def embed(texts: list[str], role: str) -> list[list[float]]:
        if role == "document":
            return embedding.get_text_embedding_batch(texts)
        return [embedding.get_query_embedding(text) for text in texts]

    return embed


def haystack(folder: str) -> Embed:
    """In Haystack 3 the embedders are in the package sentence-transformers-haystack.
    `normalize_embeddings` is False by default."""
    from haystack import Document
    from haystack_integrations.components.embedders.sentence_transformers import (
        SentenceTransformersDocumentEmbedder,
        SentenceTransformersTextEmbedder,
    )

    documents = SentenceTransformersDocumentEmbedder(
        model=folder, encode_kwargs={"prompt_name": "document"}, progress_bar=False
    )
    queries = SentenceTransformersTextEmbedder(
        model=folder, encode_kwargs={"prompt_name": "query"}, progress_bar=False
    )

    def embed(texts: list[str], role: str) -> list[list[float]]:
        if role == "query":
            return [queries.run(text)["embedding"] for text in texts]
        found = documents.run([Document(content=text) for text in texts])["documents"]
        return [document.embedding for document in found]

    return embed


FRAMEWORKS = {"langchain": langchain, "llama_index": llama_index, "haystack": haystack}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("framework", choices=FRAMEWORKS)
    arguments = parser.parse_args()
    print(stm.check_serving(FRAMEWORKS[arguments.framework](arguments.model), arguments.model))


if __name__ == "__main__":
    main()
