"""Which loss to train with on your own data: ``stm.compare`` and ``st-magnitude compare``."""
