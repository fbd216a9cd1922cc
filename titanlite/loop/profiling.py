"""Everything behind [profiling] and comm.trace_buf_size: traces of a step's time, snapshots of a GPU's memory, a record of
collectives, and the message when memory runs out."""

import os
import re
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.loop.metrics import Clock
from titanlite.transforms.shards import local_part

_COLLECTIVES = "comm_traces"  # where the flight recorder writes, inside job.dump_folder
_RECORDED_ALLOCATIONS = 100_000  # events that a memory snapshot looks back on; some 100 MB of it as a file


class Watch:
    """Profiles the steps of a run; each runs inside `with watch.step(number):`.

    Every rank writes <save_traces_folder>/step-00000010/rank-0.json.gz and <save_memory_snapshot_folder>/step-00000010/
    rank-0.pickle in the run directory, at the steps that `profile_freq` divides. The clock counts that time as a pause.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        global_batch: int,
        clock: Clock,
    ):
        self.config, self.device, self.clock = config, device, clock
        self.model, self.optimizer, self.global_batch = model, optimizer, global_batch
        self.profiler: profile | None = None
        if device.type == "cpu":
            # PyTorch 2.13 writes two lines about GPUs to standard error for each trace, at a level above its errors.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if config.profiling.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_RECORDED_ALLOCATIONS)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Raises UserError in place of torch.OutOfMemoryError; its text lists what holds the memory, and remedies."""
        self._begin(step)
        try:
            with record_function(f"step {step}"):
                yield
        except torch.OutOfMemoryError as error:
            if self.config.profiling.enable_memory_snapshot:
                self._snapshot(step, "-out-of-memory")
            raise UserError(self._out_of_memory(step, str(error))) from None
        self._end(step)

    def close(self) -> None:
        """After the last step; discards a trace that was prepared for the next one."""
        if self.profiler is not None:
            self.profiler.start_trace()
            self.profiler.stop_trace()
            self.profiler = None
        if self.config.profiling.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _begin(self, step: int) -> None:
        cfg = self.config.profiling
        if not cfg.enable_profiling or step % cfg.profile_freq not in (0, cfg.profile_freq - 1):
            return
        self._finish_queue()  # a trace would otherwise begin with kernels of the step before
        # The profiler is set up in the step before, so that its set-up is not in the trace.
        if self.profiler is None:
            with self.clock.phase(step, "profiling"):
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
        with self.clock.phase(step, "profiling"):
            if self.profiler is not None:
                self.profiler.stop_trace()
                self.profiler.export_chrome_trace(self._file(cfg.save_traces_folder, step, "json.gz"))
                self.profiler = None
            if cfg.enable_memory_snapshot:
                self._snapshot(step)

    def _finish_queue(self) -> None:
        """Waits until the GPU has done its work so far, which is training and not a part of the pause that follows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _snapshot(self, step: int, suffix: str = "") -> None:
        cfg = self.config.profiling
        torch.cuda.memory._dump_snapshot(self._file(cfg.save_memory_snapshot_folder, step, "pickle", suffix))

    def _file(self, folder: str, step: int, kind: str, suffix: str = "") -> str:
        path = Path(self.config.job.dump_folder) / folder / f"step-{step:08d}{suffix}" / f"rank-{dist.get_rank()}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def _out_of_memory(self, step: int, error: str) -> str:
        requested = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", error)
        held = held_memory(self.model, self.optimizer, self.device)
        lines = [
            f"step {step}: out of memory" + (f", {requested[1]} more were requested" if requested else ""),
            "held by this rank: " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in held.items()),
            "remedies, the cheapest first:",
            *(f"{number}. {remedy}" for number, remedy in enumerate(remedies(self.config, self.global_batch), 1)),
        ]
        return "\n  ".join(lines)


# ---------------------------------------------------------------------------------------------------------------- memory


def bytes_on(device: torch.device, tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors on a device; of a DTensor, its local shard."""
    local = [local_part(t) for t in tensors if t is not None]
    return sum(t.numel() * t.element_size() for t in local if t.device.type == device.type)


def held_memory(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """What holds the memory of `device` -> bytes. What cpu_offload has moved off the device does not count."""
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    held = {
        "parameters": bytes_on(device, model.parameters()),
        "gradients": bytes_on(device, (p.grad for p in model.parameters())),
        "optimizer state": bytes_on(device, state),
    }
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        held["activations and all else"] = max(0, allocated - sum(held.values()))
        held["reserved but unused"] = max(0, torch.cuda.memory_reserved(device) - allocated)
    return held


def remedies(config: Config, global_batch: int) -> list[str]:
    """Ways to save memory that are not in use yet, the cheapest first. global_batch: sequences of a step over all ranks."""
    ways = []
    mode, local, parallelism = config.activation_checkpoint.mode, config.training.local_batch_size, config.parallelism
    if mode != "full":
        stronger = "selective" if mode == "none" else "full"
        ways.append(f'activation_checkpoint.mode = "{stronger}": a part of the forward pass is computed twice')
    if local > 1:
        smaller = local // next(n for n in range(2, local + 1) if local % n == 0)
        ways.append(
            f"training.local_batch_size = {smaller} with training.global_batch_size = {global_batch}: "
            "more microbatches a step, the same mathematics"
        )
    shard = "a larger parallelism.data_parallel_shard_degree, on more GPUs"
    if parallelism.data_parallel_replicate_degree > 1:
        shard += " or with a smaller data_parallel_replicate_degree"
    ways.append(shard + ("" if parallelism.cpu_offload else "; or parallelism.cpu_offload = true, which is slower"))
    return ways


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
    folder = Path(config.job.dump_folder).resolve() / _COLLECTIVES
    folder.mkdir(parents=True, exist_ok=True)
    environment["TORCH_FR_BUFFER_SIZE"] = str(size)
    environment["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "rank_")  # the rank's number is added to it
    environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
