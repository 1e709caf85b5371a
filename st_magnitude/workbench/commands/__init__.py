"""The command line: one module a command, and the base of all in `core`."""
