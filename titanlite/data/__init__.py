"""From text to global batches: documents -> tokenizer -> token files on disk -> samples in a seekable order."""
