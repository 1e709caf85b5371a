"""Text on a disk: retrieval data in BEIR's layout, documents and their chunks, and the embeddings of a corpus."""
