"""The precisions that a configuration can name, as PyTorch's dtypes; config/ itself imports no torch."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
