"""Llama 3 with float16 matmuls as on a GPU, for CPUs without them: accumulated in float32, rounded once.

    ./run_train.sh CONFIG.toml --model.name benchmarks.float16_products --training.mixed_precision_param float16

On such CPUs PyTorch multiplies float16 one number at a time, up to eighty times slower than this. Importing the module replaces
the CPU kernels of this process. float32 matmuls do not change; matmuls in any other dtype raise ValueError, because they would
be computed in float32 too.
"""

import torch
from torch import Tensor
from torch import library as operators

from models.llama3 import *  # noqa: F403  every part of the family is Llama's

_ALLOWED = (torch.float16, torch.float32)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """(n, rows, inner) times (n, inner, columns), with baddbmm, whose kernel is not replaced."""
    if a.dtype not in _ALLOWED:
        raise ValueError(f"benchmarks.float16_products multiplies {_ALLOWED}, not {a.dtype}")
    ignored = torch.zeros((), dtype=torch.float32).expand(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(ignored, a.float(), b.float(), beta=0).to(a.dtype)


_KERNELS = operators.Library("aten", "IMPL", "CPU")
_KERNELS.impl("bmm", _bmm, allow_override=True)
_KERNELS.impl("mm", lambda a, b: _bmm(a[None], b[None])[0], allow_override=True)
_KERNELS.impl("bmm.out", lambda a, b, *, out: out.copy_(_bmm(a, b)), allow_override=True)
_KERNELS.impl("mm.out", lambda a, b, *, out: out.copy_(_bmm(a[None], b[None])[0]), allow_override=True)
