"""PyTorch's private names that model families use, and what for; tried on PyTorch 2.11 and 2.13.

PyTorch may rename them in any version: this file's import fails with the name, and `tests/unit/test_torch_private.py` says that
no other file of models/ uses one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

__all__ = [
    "all_to_all_single",  # all-to-all of sequences and heads, which the compiler and autograd see
    "cast_result",  # a cast that the compiler of PyTorch 2.11 does not lose
    "collectives",  # all-reduces in a compiled block: the balance of experts
    "cpu_attention",  # the CPU's attention kernel with its log-sum-exps, which merge parts of the keys
    "cpu_attention_backward",
    "onednn_linear",  # a matmul of large float32 matrices by oneDNN, for AMD's processors: twice as fast as by MKL
    "resolve_process_group",  # the group of a name: operations have names
    "wait_tensor",
]

collectives = torch.ops._c10d_functional
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
resolve_process_group: Any = distributed_c10d._resolve_process_group  # declared for names of a type of their own


def cast_result(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), for what the forward pass of an autograd.Function returns.

    Compiled by PyTorch 2.11, a Function that returns the result of a cast without effect has wrong gradients, silently.
    """
    return x if x.dtype == dtype else x.to(dtype)


def onednn_linear(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
