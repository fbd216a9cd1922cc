"""Where PyTorch's flash attention on CPUs fails in bfloat16."""

import functools

import torch
import torch.nn.functional as F


@functools.cache
def fault_of_flash() -> str:
    """Why it fails here; "" where it does not.

    It chooses its code by the processor and not by ATEN_CPU_CAPABILITY: with AMX it needs AVX-512 (PyTorch 2.13).
    """
    q = torch.zeros(1, 1, 64, 32, dtype=torch.bfloat16)
    try:
        F.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        if "pack_vnni2" not in str(error):
            raise
        return f"PyTorch's flash attention: {error}"
    return ""
