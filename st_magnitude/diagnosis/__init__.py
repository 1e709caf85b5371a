"""diagnose: what a model's own figures recommend, as an object, as text and as a page."""
