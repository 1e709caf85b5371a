"""The workbench: from a file of pairs to a decision. The plugin imports nothing of it."""
