"""Everything behind [profiling] and comm.trace_buf_size: traces of a step's time, snapshots of a GPU's memory, and a record of
collectives."""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.ground.files import tolerated
from titanlite.ground.run_files import COLLECTIVES
from titanlite.loop.metrics import Clock

_RECORDED_ALLOCATIONS = 100_000  # events that a memory snapshot looks back on; some 100 MB of it as a file


class Watch:
    """Profiles the steps of a run; each runs inside `with watch.step(number):`.

    Every rank writes <save_traces_folder>/step-00000010/rank-0.json.gz and <save_memory_snapshot_folder>/step-00000010/
    rank-0.pickle in the run directory, at the steps that `profile_freq` divides. The clock counts that time as a pause. Memory
    is recorded from here on, so the loop creates it before the model.
    """

    def __init__(self, config: Config, device: torch.device, clock: Clock):
        self.config, self.device, self.clock = config, device, clock
        self.profiler: profile | None = None
        if device.type == "cpu":
            # PyTorch 2.13 writes two lines about GPUs to standard error for each trace, at a level above its errors.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if config.profiling.enable_memory_snapshot:
            torch_private.record_memory_history(max_entries=_RECORDED_ALLOCATIONS)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self._begin(step)
        with record_function(f"step {step}"):
            yield
        self._end(step)

    def close(self) -> None:
        """After the last step; discards a trace that was prepared for the next one."""
        if self.profiler is not None:
            self.profiler.start_trace()
            self.profiler.stop_trace()
            self.profiler = None
        if self.config.profiling.enable_memory_snapshot:
            torch_private.record_memory_history(enabled=None)

    def _begin(self, step: int) -> None:
        cfg = self.config.profiling
        if not cfg.enable_profiling or step % cfg.profile_freq not in (0, cfg.profile_freq - 1):
            return
        self._finish_queue()  # a trace would otherwise begin with kernels of the step before
        # The profiler is set up in the step before, so that its set-up is not in the trace.
        if self.profiler is None:
            with self.clock.phase(step, "profiling", "profile"):
                on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
                # acc_events only silences a warning of PyTorch 2.11; one profiler makes one trace
                self.profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu], record_shapes=True, acc_events=True)
                self.profiler.prepare_trace()
        if step % cfg.profile_freq == 0:
            assert self.profiler is not None
            self.profiler.start_trace()

    def _end(self, step: int) -> None:
        cfg = self.config.profiling
        if step % cfg.profile_freq or not (cfg.enable_profiling or cfg.enable_memory_snapshot):
            return
        self._finish_queue()
        with self.clock.phase(step, "profiling", "profile"):
            if self.profiler is not None:
                self.profiler.stop_trace()
                with tolerated(cfg.save_traces_folder):
                    self.profiler.export_chrome_trace(_file(self.config, cfg.save_traces_folder, step, "json.gz"))
                self.profiler = None
            snapshot(self.config, step)

    def _finish_queue(self) -> None:
        """Waits for the GPU: the work queued so far is training, and no part of the pause that follows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def snapshot(config: Config, step: int, suffix: str = "") -> None:
    """A snapshot of a GPU's memory in this step, if they are enabled."""
    cfg = config.profiling
    if cfg.enable_memory_snapshot:
        with tolerated(cfg.save_memory_snapshot_folder):
            torch_private.dump_snapshot(_file(config, cfg.save_memory_snapshot_folder, step, "pickle", suffix))


def _file(config: Config, folder: str, step: int, kind: str, suffix: str = "") -> str:
    path = Path(config.job.dump_folder) / folder / f"step-{step:08d}{suffix}" / f"rank-{dist.get_rank()}.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


# ----------------------------------------------------------------------------------------------------------- collectives


def record_collectives(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets up NCCL's flight recorder, before the process group starts; a hang then leaves comm_traces/rank_N, a pickle.

    By default PyTorch 2.11 to 2.13 record 2,000 collectives and write them outside of the run directory. The variables' names
    are from torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.cpp; older names cause warnings.
    """
    size = config.comm.trace_buf_size
    if size == 0:
        environment.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        return
    folder = Path(config.job.dump_folder).resolve() / COLLECTIVES
    folder.mkdir(parents=True, exist_ok=True)
    environment["TORCH_FR_BUFFER_SIZE"] = str(size)
    environment["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "rank_")  # the rank's number is added to it
    environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
