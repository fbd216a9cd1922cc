"""What a run reports: console, metrics.jsonl, TensorBoard; training speed; model FLOPs utilization."""

import contextlib
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.blocks import Flops
from titanlite.config.schema import Config
from titanlite.ground.errors import at
from titanlite.ground.files import append, replace_file, sync, tolerated
from titanlite.ground.run_files import ASIDE, METRICS, read_reports

log = logging.getLogger(__name__)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # Linux counts KiB, macOS bytes


def largest_peak_gib(device: torch.device) -> float:
    """`peak_memory_gib` of the rank that has used most, which in a pipeline is not always the first; all ranks together."""
    peak = torch.tensor(peak_memory_gib(device), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


class Clock:
    """Splits the time between two reports into training and named pauses such as saving."""

    def __init__(
        self, started: float, explained: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    ):
        """started: time.perf_counter() where the first interval begins. explained: surrounds each phase."""
        self._explained = explained
        self.totals: dict[str, float] = {}  # seconds of each pause since the start
        self.restart()
        self.started = started

    def restart(self) -> None:
        """Begins a new interval."""
        self.started = time.perf_counter()
        self.steps = 0  # the loop counts them
        self.pauses: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, step: int, what: str, pause: str = "") -> Iterator[None]:
        """A phase of a step, for the log of a rank that fails (launch/stacks.py) and for the time that reports count.

        step: 0 before the first one. pause: the name of a pause, which is no part of training, for `add_pause`.
        """
        at(step, what)
        begin = time.perf_counter()
        with self._explained():
            yield
        if pause:
            self.add_pause(pause, time.perf_counter() - begin)

    def add_pause(self, name: str, seconds: float) -> None:
        """Time of this interval that is not training: excluded from the speed, and reported as `<name>_seconds`."""
        self.pauses[name] = self.pauses.get(name, 0.0) + seconds
        self.totals[name] = self.totals.get(name, 0.0) + seconds


def speed(clock: Clock, step_tokens: int, devices: int, flops: Flops, peak: float | None, waited: float) -> dict[str, float]:
    """Tokens a second of the whole job since the clock's last restart, and derived values; MFU only with a `peak`.

    step_tokens: of a global batch; devices: of the whole job; flops: a token's; peak: the device's FLOP/s; waited: seconds of
    training without data.
    """
    seconds = time.perf_counter() - clock.started - sum(clock.pauses.values())  # of training
    per_second = clock.steps * step_tokens / seconds
    per_device = per_second / devices
    values = {
        "tokens_per_second": per_second,
        "tokens_per_second_per_device": per_device,
        "data_wait_fraction": waited / seconds,
    }
    if peak is not None:
        values |= {"mfu_causal": per_device * flops.causal / peak, "mfu_palm": per_device * flops.palm / peak}
    return values | {f"{name}_seconds": pause for name, pause in clock.pauses.items()}


class Reporter:
    """Writes reports, on one rank. Lines that a full disk refuses are written to metrics.jsonl with a later report.

    A metrics.jsonl that was removed or renamed (logrotate) is begun again.
    """

    def __init__(self, config: Config, first_step: int, active: bool):
        """Moves reports of `first_step` and later to ASIDE: an earlier start may have got further than its last checkpoint."""
        self.board: Any = None
        self._config, self._active, self._path = config, active, Path(config.job.dump_folder) / METRICS
        self._waiting = b""  # lines that are not on the disk yet
        self.begin(first_step)

    def begin(self, first_step: int) -> None:
        """Makes `first_step` the next one that is reported; moves the reports of it and of later ones to ASIDE."""
        if self._active:
            self.close()
            self._waiting = b""
            with tolerated(self._path):
                _set_aside_from(self._path, first_step)
            self._to_board(lambda board: None, purge_step=first_step)

    def report(self, step: int, values: dict[str, Any]) -> None:
        """One step's values, unrounded, to metrics.jsonl and TensorBoard; null for those that are not finite."""
        if not self._active:
            return
        values = {name: finite(value) if isinstance(value, float) else value for name, value in values.items()}
        self._waiting += (json.dumps({"step": step, **values}) + "\n").encode()
        self._write()

        def add(board: Any) -> None:
            for name, value in values.items():
                if value is not None:
                    board.add_scalar(name, value, step)

        self._to_board(add)

    def samples(self, step: int, texts: list[str]) -> None:
        """Texts of the model, to TensorBoard, as code blocks that Markdown does not format."""

        def add(board: Any) -> None:
            for number, text in enumerate(texts):
                board.add_text(f"sample/{number}", "".join(f"    {line}\n" for line in text.splitlines()), step)

        self._to_board(add)

    def close(self) -> None:
        if self._active:
            self._write()
            with tolerated(self._path), contextlib.suppress(FileNotFoundError):  # there were no reports
                sync(self._path)
        board, self.board = self.board, None
        if board is not None:
            with tolerated("TensorBoard's files"):
                board.close()

    def _write(self) -> None:
        with tolerated(self._path):
            if self._waiting:
                handle = append(self._path)
                try:
                    while self._waiting:
                        self._waiting = self._waiting[os.write(handle, self._waiting) :]
                finally:
                    os.close(handle)

    def _to_board(self, add: Callable[[Any], None], purge_step: int | None = None) -> None:
        """Adds to TensorBoard's files. A failure ends the thread that writes them, and a later report begins another one."""
        cfg = self._config.metrics
        full = self.board is None and self._waiting  # as metrics.jsonl has found
        if not self._active or not cfg.enable_tensorboard or full:
            return
        before, self.board = self.board, None
        with tolerated("TensorBoard's files"):
            if before is None:
                from torch.utils.tensorboard import SummaryWriter  # most of a second, on one rank

                folder = Path(self._config.job.dump_folder) / cfg.save_tb_folder
                before = SummaryWriter(str(folder), purge_step=purge_step)
            add(before)
            self.board = before


def _set_aside_from(path: Path, first_step: int) -> None:
    """A start that finds no checkpoint begins again in the folder of a run that may have taken weeks."""
    reports = [(report["step"], json.dumps(report) + "\n") for report in read_reports(path)]
    kept = [line for step, line in reports if step < first_step]
    if later := [line for step, line in reports if step >= first_step]:
        aside = path.with_name(ASIDE)
        log.info("%s: %d reports of step %d and later are moved to %s", path, len(later), first_step, aside)
        with os.fdopen(append(aside), "w") as file:
            file.writelines(later)
        sync(aside)
    if path.exists():
        replace_file(path, "".join(kept))


def finite(value: float | None) -> float | None:
    """A number that JSON can hold: None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None


# What a line of the console shows, if the report has it: None for the loss of no labels.
_CONSOLE = {
    "loss_mean": "mean loss {:.4f}",
    "loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3f}",
    "lr": "lr {:.2e}",
    "expert_load": "expert load {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "data_wait_fraction": "data wait {:.1%}",
    "validation_loss": "validation loss {:.4f}",
    "validation_bits_per_byte": "{:.4f} bits a byte",
    "validation_loss_ema": "of the EMA {:.4f}",
    "mfu_causal": "MFU {:.1%} causal",
    "mfu_palm": "MFU {:.1%} PaLM",
    "peak_memory_gib": "memory {:.2f} GiB",
}


def console_line(step: int, steps: int, values: dict[str, Any]) -> str:
    """A report as one line of the console."""
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    for name, text in _CONSOLE.items():
        if name in values:
            value, label = values[name], text.partition(" {")[0]
            aside = f"{label} n/a" if value is None else f"{label} not finite"
            parts.append(aside if finite(value) is None else text.format(value))
    pauses = [name for name in values if name.endswith("_seconds") and not name.startswith("extra/")]
    parts += [f"{name.removesuffix('_seconds')} {values[name]:.2f} s" for name in pauses]
    return "  ".join(parts)
