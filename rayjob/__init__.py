"""The training job: corpus, blocks, training, tracking, command line."""
