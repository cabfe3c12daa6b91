"""Generation engine: from a checkpoint and token ids to a stream of text, independent of HTTP and Ray."""
