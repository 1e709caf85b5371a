"""Losses. Every name is imported when it is first used, so the commands load the table alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
