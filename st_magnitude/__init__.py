"""Contrastive losses for sentence-transformers and open_clip that use norm, temperature and
geometry on purpose.

Every name is imported when it is first used, so ``import st_magnitude`` and ``st-magnitude --help``
are fast.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
