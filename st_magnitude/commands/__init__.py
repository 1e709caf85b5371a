"""The command line, one module a command, and the Python functions behind its longer commands.

`main` is ``st-magnitude`` and ``python -m st_magnitude``. The modules import torch inside their functions only.
"""

from st_magnitude.commands.app import main

__all__ = ["main"]
