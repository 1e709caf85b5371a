"""Texts and judgments: retrieval data, its embeddings, and the encoding of a corpus on the disk."""
