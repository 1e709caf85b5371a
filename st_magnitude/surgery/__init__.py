"""Functions that change the end of a model, its adapters, and its word table while it trains."""
