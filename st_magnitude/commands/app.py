"""The command line with all its commands."""

import os
from importlib import import_module

from st_magnitude.commands.core import app, show_progress

__all__ = ["app", "main"]

# In the order in which `st-magnitude --help` lists them. Each module registers its command.
for _name in (
    *("train", "compare", "mine", "calibrate"),
    *("diagnose", "compress", "check_serving", "mteb", "revela"),
):
    import_module(f"st_magnitude.commands.{_name}")


def main() -> None:
    """Runs ``st-magnitude``. A log file gets no progress bars: tqdm reads the variable when it is
    imported."""
    if not show_progress():
        os.environ.setdefault("TQDM_DISABLE", "1")
    app()
