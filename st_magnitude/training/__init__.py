"""Around a Trainer: what watches a run, and what a run needs that resumes."""

from st_magnitude.training.attach import attach
from st_magnitude.training.monitor import NormMonitor

__all__ = ["NormMonitor", "attach"]
