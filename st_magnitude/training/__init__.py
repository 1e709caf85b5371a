"""Beside a Trainer: what watches a run, and what a run needs of sentence-transformers' Trainer."""

from st_magnitude.training.monitor import NormMonitor

__all__ = ["NormMonitor"]
