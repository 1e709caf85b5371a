"""Fine-tuning a retriever on retrieval data: settings, the run and its verdict."""
