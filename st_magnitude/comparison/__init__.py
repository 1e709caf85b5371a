"""Which loss to train with on your own data: `st_magnitude.compare` and ``st-magnitude compare``."""
