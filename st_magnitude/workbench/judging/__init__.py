"""Judging ways to search on the same queries: who judges, who contends, and what to deploy."""
