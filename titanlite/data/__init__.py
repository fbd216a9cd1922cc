"""From text to global batches: documents -> tokenizer -> one row of token ids on disk -> samples in a seekable order."""
