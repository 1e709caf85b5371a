"""Texts and judgments: retrieval data and its embeddings."""
