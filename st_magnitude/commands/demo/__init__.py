"""``st-magnitude demo``: fine-tune a retriever on the API docs of your own Python environment."""
