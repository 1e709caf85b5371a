"""diagnose: what a model's own figures recommend, as an object and as text."""
