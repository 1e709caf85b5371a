"""Saving a model for everybody downstream to score as it was trained."""
