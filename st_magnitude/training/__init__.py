"""Around a Trainer: what watches a run, what a resumed run needs, and what the commands need of
it."""

from st_magnitude.training.attach import attach
from st_magnitude.training.monitor import NormMonitor

__all__ = ["NormMonitor", "attach"]
