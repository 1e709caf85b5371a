"""The command line, and the Python functions behind its longer commands."""
