"""The error when memory runs out, in any phase of a run: where it happens, what holds the memory, and what helps."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from models.decoder import Decoder
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, current_step, where
from titanlite.launch import failure, process
from titanlite.launch.layout import number
from titanlite.loop.profiling import snapshot
from titanlite.loop.remedies import remedies
from titanlite.optim.ema import ema_of
from titanlite.transforms.shards import local_part

GIB = 2**30


class OutOfMemory(UserError):
    """The memory of a GPU, or of the machine, ran out."""


class Memory:
    """The memory of this rank: what holds it, once the loop has set `model` and `optimizer`."""

    def __init__(self, config: Config, device: torch.device, global_batch: int):
        self.config, self.device, self.global_batch = config, device, global_batch
        self.model: Decoder | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an allocator's error into OutOfMemory, which says where memory ran out and what helps."""
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not failure.ran_out(error):
                raise
            snapshot(self.config, current_step(), "-out-of-memory")
            raise OutOfMemory(self._text(failure.out_of_memory(error))) from None

    def _text(self, what: str) -> str:
        held = held_memory(self.model, self.optimizer, self.device)
        total, free = capacity(self.device)
        (rank, ranks), cuda = process.rank_and_world(), self.device.type == "cuda"
        share = total / (1 if cuda else number("LOCAL_WORLD_SIZE", ranks)) / GIB  # the ranks share a machine
        owner = "the machine" if self.device.type == "cpu" else str(self.device)
        found = remedies(self.config, self.global_batch, cuda, self.model)
        lines = [
            f"{where(f'rank {rank}')}: {what}",
            "held by this rank: "
            + (", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in held.items()) or "no model yet"),
            f"{owner} has {total / GIB:.2f} GiB" + (f", of which {free / GIB:.2f} GiB are free" if free is not None else ""),
            "remedies, the cheapest first:",
            *(f"{number}. {way}" for number, way in enumerate(found, 1)),
            f"a prediction: titanlite estimate {shlex.join(sys.argv[1:])} --ranks {ranks} --device-memory-gib {share:.4g}",
        ]
        return "\n  ".join(lines)


def capacity(device: torch.device) -> tuple[int, int | None]:
    """(bytes of a GPU, or those of the machine that this process may use; how many are free).

    None where only that of the whole machine is known, as in a container, or nothing, as on macOS.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    total = machine_memory()
    known = "SC_AVPHYS_PAGES" in os.sysconf_names and total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None


def machine_memory() -> int:
    """Bytes of the machine's memory, or of the part that a container gives to this process."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no control group, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def bytes_on(device: torch.device, tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors on a device; of a DTensor, its local shard."""
    local = [local_part(t) for t in tensors if t is not None]
    return sum(t.numel() * t.element_size() for t in local if t.device.type == device.type)


def held_memory(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device) -> dict[str, int]:
    """What holds the memory of `device` -> bytes. What cpu_offload has moved off the device does not count.

    model, optimizer: None before they are built.
    """
    held: dict[str, int] = {}
    if model is not None and optimizer is not None:
        average, teacher = ema_of(optimizer), getattr(model, "teacher", None)
        state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        held = {
            "parameters": bytes_on(device, model.parameters()),
            "gradients": bytes_on(device, (p.grad for p in model.parameters())),
            "optimizer state": bytes_on(device, state),
            **({"EMA": bytes_on(device, average.averages.values())} if average else {}),
            **({"teacher": bytes_on(device, teacher.model.parameters())} if teacher else {}),
        }
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        held["activations and all else" if held else "all tensors so far"] = max(0, allocated - sum(held.values()))
        held["reserved but unused"] = max(0, torch.cuda.memory_reserved(device) - allocated)
    return held
