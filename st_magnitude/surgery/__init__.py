"""Functions that change what a model ends in, how large its embeddings are, and adapters."""
