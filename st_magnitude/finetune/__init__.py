"""Fine-tuning a retriever on retrieval data: settings, the run, and the comparison with the
pretrained model."""
