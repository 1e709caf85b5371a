"""open_clip."""
