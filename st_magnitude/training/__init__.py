"""Around a Trainer: monitoring, logging, stopping and resuming."""

from st_magnitude.training.attach import attach
from st_magnitude.training.monitor import NormMonitor

__all__ = ["NormMonitor", "attach"]
