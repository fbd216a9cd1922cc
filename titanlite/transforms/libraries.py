"""Optional libraries, and what their imports log."""

import logging


def silence_imports() -> None:
    """Call before importing torchao or transformers, which imports it: hides warnings of kernels that this machine lacks, and
    of PyTorch about the library's own code."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
