"""diagnose: recommendations from the figures of a model, as an object and as text."""
