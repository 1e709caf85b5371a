"""The command line with all its commands."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module

from st_magnitude.workbench.commands.core import Warnings, app, report, show_progress

__all__ = ["app", "main"]

# In the order in which `st-magnitude --help` lists them. Each module registers its command.
for _command in ("train", "search", "compare", "calibrate", "compress", "check_serving"):
    import_module(f"st_magnitude.workbench.commands.{_command}")


def main() -> None:
    """Runs ``st-magnitude``. A log file gets no progress bars: tqdm reads the variable when it is
    imported."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; the next file that is opened would get its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        if mode == "w":
            getattr(sys, name).reconfigure(errors="backslashreplace")  # cp1252 has no arrow
    logging.getLogger("st_magnitude").addHandler(Warnings(logging.WARNING))
    logging.getLogger("st_magnitude").propagate = False
    warnings.simplefilter("ignore", FutureWarning)  # of other packages, for their developers
    # of batches without repeats, about which training has a sentence of its own
    logging.getLogger("sentence_transformers.base.sampler").setLevel(logging.ERROR)
    if not show_progress():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except OSError as error:  # of --help, which no command prints
        sys.exit(report(error))
