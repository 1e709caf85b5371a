"""Functions that change the end of a model, the size of its embeddings and its adapters."""
