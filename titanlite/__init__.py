"""titanlite: a reference training framework for large language models on PyTorch. Start reading at train.py."""
