"""What a run reports: console, metrics.jsonl, TensorBoard; training speed; model FLOPs utilisation."""

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from models.blocks import Flops
from titanlite.config.schema import Config
from titanlite.files import replace_file
from titanlite.launch import stacks

log = logging.getLogger(__name__)

# Dense bfloat16 FLOP/s by the driver's name of the device, first match; from the vendors' data sheets.
_PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's dense FLOP/s in bfloat16, or None for an unknown device or another precision."""
    if device.type != "cuda" or precision != "bfloat16":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """The dense bfloat16 FLOP/s of a device by the driver's name, or None if it is unknown."""
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # Linux counts KiB, macOS bytes


# What a phase of the loop counts as: waiting for data, which is a part of training, or a pause, which is not.
_COUNTED_AS = {
    "reading data": "data_wait",
    "going back": "rollback",
    "validation": "validation",
    "writing samples": "samples",
    "saving": "save",
    "finishing": "save",
    "exporting": "save",
}


class Clock:
    """Splits the time between two reports into training, waiting for data, and named pauses such as saving."""

    def __init__(self, started: float | None = None):
        """started: time.perf_counter() where the first interval begins; None: now."""
        self.totals: dict[str, float] = {}  # seconds of each pause since the start
        self.restart()
        if started is not None:
            self.started = started

    def restart(self) -> None:
        """Begins a new interval."""
        self.started, self.steps = time.perf_counter(), 0
        self.data_wait = 0.0
        self.pauses: dict[str, float] = {}

    @contextmanager
    def phase(self, step: int, what: str) -> Iterator[None]:
        """A phase of a step, for the log of a rank that fails (launch/stacks.py) and for the time that reports count.

        step: 0 before the first one. What _COUNTED_AS does not name is training.
        """
        stacks.at(step, what)
        begin = time.perf_counter()
        yield
        seconds, name = time.perf_counter() - begin, _COUNTED_AS.get(what)
        if name == "data_wait":
            self.data_wait += seconds
        elif name:
            self.add_pause(name, seconds)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Time that is not training: excluded from the speed, and reported as `<name>_seconds`."""
        begin = time.perf_counter()
        yield
        self.add_pause(name, time.perf_counter() - begin)

    def add_pause(self, name: str, seconds: float) -> None:
        """A pause of this interval that was measured elsewhere."""
        self.pauses[name] = self.pauses.get(name, 0.0) + seconds
        self.totals[name] = self.totals.get(name, 0.0) + seconds

    def training_seconds(self) -> float:
        return time.perf_counter() - self.started - sum(self.pauses.values())


class Meter:
    """Speed and memory since the last report."""

    def __init__(self, clock: Clock, step_tokens: int, devices: int, flops: Flops, device: torch.device, config: Config):
        """step_tokens: of a global batch; devices: of the whole job; flops: a token's."""
        self.clock, self.step_tokens, self.devices, self.flops, self.device = clock, step_tokens, devices, flops, device
        self.peak = peak_flops(device, config.training.mixed_precision_param)

    def count_step(self) -> None:
        self.clock.steps += 1

    def read(self) -> dict[str, float]:
        """`speed` since the clock's last restart, and peak_memory_gib."""
        values = speed(self.clock, self.clock.steps * self.step_tokens, self.devices, self.flops, self.peak)
        return values | {"peak_memory_gib": peak_memory_gib(self.device)}


def speed(clock: Clock, tokens: int, devices: int, flops: Flops, peak: float | None) -> dict[str, float]:
    """Tokens a second of the whole job since the clock's last restart, and derived values; MFU only with a `peak`."""
    seconds = clock.training_seconds()
    values = {
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_device": tokens / seconds / devices,
        "data_wait_fraction": clock.data_wait / seconds,
    }
    if peak is not None:
        per_device = tokens / seconds / devices
        values |= {"mfu_causal": per_device * flops.causal / peak, "mfu_palm": per_device * flops.palm / peak}
    return values | {f"{name}_seconds": pause for name, pause in clock.pauses.items()}


class Reporter:
    """Writes reports, on one rank."""

    def __init__(self, folder: Path, tensorboard: str | None, first_step: int, active: bool):
        """folder: the run directory; tensorboard: the name of its event folder, or None; first_step: the next step.

        Removes reports of `first_step` and later, which a run leaves that got further than its last checkpoint.
        """
        self.file: TextIO | None = None
        self.board: Any = None
        self._folder, self._tensorboard, self._active = folder, tensorboard, active
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        if self._active:
            path = self._folder / "metrics.jsonl"
            _drop_reports_from(path, first_step)
            self.file = open(path, "a", encoding="utf-8")
            if self._tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # most of a second, on one rank

                self.board = SummaryWriter(str(self._folder / self._tensorboard), purge_step=first_step)

    def go_back(self, step: int) -> None:
        """Removes the reports of steps after `step`, which are repeated."""
        self.close()
        self._open(step + 1)

    def report(self, step: int, values: dict[str, Any]) -> None:
        """One step's values, unrounded, to metrics.jsonl and TensorBoard."""
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if value is None:
                    continue
                self.board.add_scalar(name, value, step)

    def samples(self, step: int, texts: list[str]) -> None:
        """Texts of the model, to TensorBoard, as code blocks that Markdown does not format."""
        if self.board is not None:
            for number, text in enumerate(texts):
                self.board.add_text(f"sample/{number}", "".join(f"    {line}\n" for line in text.splitlines()), step)

    def close(self) -> None:
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.file.close()
        if self.board is not None:
            self.board.close()


def _drop_reports_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) < first_step]
    if len(kept) < len(lines):
        dropped = len(lines) - len(kept)
        log.info("%s: %d reports of step %d and later, from an earlier start, are replaced", path, dropped, first_step)
        replace_file(path, "".join(kept))


def _step_of(line: str) -> float:
    """The step of a report; infinite for a torn line of a killed run."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def console_line(step: int, steps: int, values: dict[str, Any]) -> str:
    """A report as one line of the console."""
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        "loss not finite" if values["loss"] is None else f"loss {values['loss']:.4f}",
        "grad norm not finite, step skipped" if values["grad_norm"] is None else f"grad norm {values['grad_norm']:.3f}",
        f"lr {values['lr']:.2e}",
    ]
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"data wait {values['data_wait_fraction']:.1%}")
    if "validation_loss" in values:
        parts.append(f"validation loss {values['validation_loss']:.4f}")
    if "validation_bits_per_byte" in values:
        parts.append(f"{values['validation_bits_per_byte']:.4f} bits a byte")
    if "mfu_causal" in values:
        parts.append(f"MFU {values['mfu_causal']:.1%} causal, {values['mfu_palm']:.1%} PaLM")
    parts.append(f"memory {values['peak_memory_gib']:.2f} GiB")
    parts += [f"{name.removesuffix('_seconds')} {value:.2f} s" for name, value in values.items() if name.endswith("_seconds")]
    return "  ".join(parts)
