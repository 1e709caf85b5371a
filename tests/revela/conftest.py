"""Revela needs a release of sentence-transformers that the rest does not."""

from st_magnitude._upstream import SINCE_6_2

collect_ignore_glob = [] if SINCE_6_2 else ["test_*.py"]
