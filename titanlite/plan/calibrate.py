"""`titanlite plan --calibrate`: what the machine at hand reaches, as an entry like those of devices.toml.

All ranks run each operation at the same time, as in training: ranks on a CPU share its processors. A result is the median of
its repetitions on rank 0. On a CPU it is the mean in the shortest stretch of them, since other programs only add to it; the
shortest single one is a rate that a step of thousands of operations does not have, and small trainings correct it. What one
machine cannot show is the shipped entry's of the same GPU, or 0 for unknown.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.loop.memory import capacity
from titanlite.plan.report import GIB
from titanlite.plan.small_runs import in_training
from titanlite.plan.time import LINK, Device, devices, peak_flops_of, shipped_as

_LONGEST = 2.0  # seconds of one operation's repetitions
_STRETCH = 0.02  # seconds of repetitions, of which a CPU takes the mean
_SMALL = 4096  # bytes of a collective of which nearly all is latency


class Sizes(NamedTuple):
    """What is measured on a kind of device."""

    matmuls: tuple[tuple[int, int, int], ...]  # tokens, rows, columns
    attention: tuple[int, int, int, int]  # batch, heads, tokens, head_dim
    copied: int  # bytes
    message: int  # bytes of a large collective, in all


_CUDA = Sizes(((4096, 4096, 4096), (8192, 8192, 8192), (16384, 14336, 4096)), (2, 32, 4096, 128), 2**30, 2**28)
_CPU = Sizes(((256, 256, 256), (256, 1024, 256), (512, 512, 512)), (1, 4, 256, 64), 2**24, 2**22)


class Measured(NamedTuple):
    """A line of the table. amount: FLOPs or bytes, or 1 of an operation."""

    name: str
    seconds: float
    amount: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


class Clock(NamedTuple):
    """Times operations, on all ranks together. seconds: for the repetitions of each."""

    device: torch.device
    seconds: float

    def __call__(self, run: Callable[[], object]) -> float:
        """Seconds of an operation, of 3 runs or more, as many on every rank."""
        self._once(run)  # the first one allocates
        often = torch.tensor(max(3, min(1000, math.ceil(self.seconds / self._once(run)))), device=self.device)
        dist.broadcast(often, 0)
        times = [self._once(run) for _ in range(int(often))]
        return statistics.median(times) if self.device.type == "cuda" else shortest_stretch(times)

    def _once(self, run: Callable[[], object]) -> float:
        self._finish()
        begun = time.perf_counter()
        run()
        self._finish()
        return time.perf_counter() - begun

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def shortest_stretch(times: list[float]) -> float:
    """The least mean of consecutive times that are about _STRETCH seconds together."""
    length = max(1, min(len(times), round(_STRETCH / statistics.median(times))))
    return min(statistics.fmean(times[first : first + length]) for first in range(0, len(times) - length + 1, length))


def calibrate(device: torch.device, seconds: float) -> str:
    """The text of a device file; every rank of the process group calls it. seconds: for all measurements together, but for
    the small trainings on a CPU."""
    on_gpu, ranks = device.type == "cuda", dist.get_world_size()
    sizes = _CUDA if on_gpu else _CPU
    first, second = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32, torch.bfloat16)
    clock = Clock(device, min(_LONGEST, seconds / 20))  # 13 operations, each with two runs before it
    table = [_matmul(clock, first, size) for size in sizes.matmuls]
    table += [_matmul(clock, second, sizes.matmuls[0]), _attention(clock, first, sizes.attention)]
    source, target = (torch.ones(sizes.copied // 4, device=device) for _ in range(2))
    copy = clock(lambda: target.copy_(source))
    table += [Measured("copy, bytes read and written", copy, 2 * sizes.copied), _launch(clock)]
    *matmuls, other, attention, copied, launch = table
    table += (collectives := [each for size in (_SMALL, sizes.message) for each in _collectives(clock, size)])
    reached = sum(each.amount for each in matmuls) / sum(each.seconds for each in matmuls)
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    peak = max(reached, (peak_flops_of(name) or 0.0) if on_gpu else 0.0)
    share = reached / peak
    by_type = {first: peak / 1e12, second: other.rate / share / 1e12}
    found = shipped_as(name) if on_gpu else None
    key, shipped = found or ("gpu" if on_gpu else "cpu"), devices()[found] if found else None
    bandwidth, latency = _link(collectives, ranks) if collectives else (0.0, 0.0)
    entry: dict[str, Any] = {
        "bf16_tflops": by_type[torch.bfloat16],
        "float32_tflops": by_type[torch.float32],
        "fp8_tflops": shipped.fp8_tflops if shipped else 0.0,
        "memory_gib": capacity(device)[0] / GIB / (1 if on_gpu else ranks),
        "memory_gb_per_second": copied.rate / 1e9,
        "nvlink_gb_per_second": bandwidth or (shipped.nvlink_gb_per_second if shipped else 0.0),
        "network_gb_per_second": shipped.network_gb_per_second if shipped else 0.0,
        "sms": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1,
        "matmul": share,
        "attention": min(1.0, attention.rate / peak),
        "launch_microseconds": launch.seconds * 1e6,
    }
    if collectives:
        entry["hop_microseconds"] = latency * 1e6
    if not on_gpu:
        entry["cpu_ranks"] = ranks
        entry |= in_training(device, Device.model_validate(entry))
    head = f"{name}, ranks: {ranks}, threads of each: {torch.get_num_threads()}, PyTorch {torch.__version__}, {date.today()}"
    lines = [f"# titanlite plan --calibrate: {head}, load {os.getloadavg()[0]:.1f}"]
    lines += [f"# {each.name}: {each.seconds * 1e6:,.1f} us, {each.rate / 1e9:,.3f} G/s" for each in table]
    if not collectives:
        lines.append(f"# links: {f'those of the shipped {key}' if shipped else 'unknown, so that plan refuses several ranks'}")
    return "\n".join([*lines, *_table(key, entry)]) + "\n"


def _table(key: str, entry: Mapping[str, Any]) -> list[str]:
    """The lines of a TOML table and the tables in it, its numbers with five digits."""
    lines, inner = [f"[{key}]"], []
    for name, value in entry.items():
        if isinstance(value, dict):
            inner += _table(f"{key}.{name}", value)
        else:
            lines.append(f"{name} = {value if isinstance(value, int) else float(f'{value:.5g}')}")
    return [*lines, *inner]


def _matmul(clock: Clock, dtype: torch.dtype, size: tuple[int, int, int]) -> Measured:
    tokens, rows, columns = size
    # random values: a GPU at its power limit computes with zeros or ones faster
    inputs, weight = (torch.randn(each, columns, dtype=dtype, device=clock.device) for each in (tokens, rows))
    name = f"matmul {str(dtype).removeprefix('torch.')} {tokens} x {rows} x {columns}"
    return Measured(name, clock(lambda: inputs @ weight.T), 2 * tokens * rows * columns)


def _attention(clock: Clock, dtype: torch.dtype, size: tuple[int, int, int, int]) -> Measured:
    """Causal, forward and backward: six matmuls of which half is computed."""
    q, k, v = (torch.randn(size, dtype=dtype, device=clock.device, requires_grad=True) for _ in range(3))
    gradient = torch.ones(size, dtype=dtype, device=clock.device)

    def run() -> None:
        # into new tensors, as in training: backward() would add to gradients of the run before
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    batch, heads, tokens, head_dim = size
    flops = 6 * batch * heads * tokens**2 * head_dim
    return Measured(f"attention {batch} x {heads} x {tokens} x {head_dim}", clock(run), flops)


def _launch(clock: Clock, often: int = 50) -> Measured:
    """An operation that computes next to nothing, with autograd: a matmul of a chain, forward and backward."""
    weight = torch.ones(16, 16, device=clock.device, requires_grad=True)

    def run() -> None:
        hidden = torch.ones(1, 16, device=clock.device)
        for _ in range(often):
            hidden = F.linear(hidden, weight)
        hidden.sum().backward()

    return Measured("an operation", clock(run) / (3 * often), 1)


def _collectives(clock: Clock, size: int) -> list[Measured]:
    """Of `size` bytes in all; none on a single rank."""
    if (ranks := dist.get_world_size()) == 1:
        return []
    whole = torch.ones(size // 4 // ranks * ranks, device=clock.device)
    part = torch.ones(len(whole) // ranks, device=clock.device)
    runs: dict[str, Callable[[], object]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }
    return [Measured(f"{name} of {size:,} bytes", clock(run), size) for name, run in runs.items()]


def _link(collectives: list[Measured], ranks: int) -> tuple[float, float]:
    """(GB/s of a rank's link, seconds of latency between neighbors of a ring): medians of the three kinds.

    An all-reduce is a reduce-scatter and an all-gather. As in devices.toml, collectives reach LINK of the link.
    """
    small, large = collectives[:3], collectives[3:]
    passes = (1, 1, 2)
    latency = statistics.median(each.seconds / often for each, often in zip(small, passes, strict=True))
    sending = statistics.median(each.seconds / often for each, often in zip(large, passes, strict=True)) - latency
    sent = large[0].amount * (ranks - 1) / ranks
    return sent / max(sending, 1e-9) / LINK / 1e9, latency / (ranks - 1)
