"""The model: architecture, loss, cache, sampling, tokenizer and checkpoint format. Knows nothing of Ray."""
