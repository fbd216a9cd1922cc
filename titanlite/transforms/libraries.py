"""Optional libraries, and what their imports log."""

import logging


def silence_imports() -> None:
    """Hides warnings about kernels that this machine lacks, and PyTorch's warnings about the library's own code.

    Call it before importing torchao, or transformers, which imports torchao.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
