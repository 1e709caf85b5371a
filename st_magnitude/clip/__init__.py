"""Losses that keep magnitude for open_clip, and models that do not normalise.

Names are imported when they are first used: ``import st_magnitude`` does not need open_clip.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
