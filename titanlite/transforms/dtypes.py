"""The precisions of a configuration as PyTorch's dtypes; config/ itself imports no torch.

A TOML file cannot name float64; the tools set it to distinguish a fault from rounding.
"""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
