"""``st-magnitude demo``: teach a retriever the API docs of your own Python environment."""
