"""From book text to a tokenizer and Parquet blocks of tokens; `prepare.py` is the way in."""
