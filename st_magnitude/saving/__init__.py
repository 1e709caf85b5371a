"""Saves a model that everybody downstream scores as it was trained."""
