"""Files as queries, documents and judgments."""
