"""`titanlite plan` and `estimate` compared with small runs on this CPU: python -m benchmarks.plan_cpu [--output FILE.md]

Random models, batches and meshes of 1, 2 and 4 ranks in float32, each rank with one thread. The speed of a machine drifts, so
`titanlite plan --calibrate` and the run take turns; a row has the turn with the median error. The time of a turn is that of
its shortest step, since other programs only slow steps down. They affect CPU time less, but on several ranks it excludes
waiting. Memory is the growth of a rank's resident size from before the model is built to its peak, measured twice: with
glibc's default, which keeps freed blocks, and with a separate mapping for each tensor from 8 KiB on, which is returned when
the tensor is freed, and without the buffers that MKL keeps.
"""

import argparse
import ctypes
import gc
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.config.schema import Config
from titanlite.ground.untrusted import parse_toml
from titanlite.launch.local_ranks import on_ranks
from titanlite.plan.calibrate import calibrate
from titanlite.plan.small_runs import train, uncompiled_job
from titanlite.plan.time import Choice, Device, step
from titanlite.tools.plan import predicted

_MIB = 2**20
_STEPS = 6
_TURNS, _CALIBRATION = 3, 3.0  # and seconds of the calibration in each
_MMAP_THRESHOLD = -3  # of glibc's mallopt
_MESHES = {  # degrees by the number of ranks
    "dp_shard": {2: {"dp_shard": 2}, 4: {"dp_shard": 4}},
    "dp_replicate": {2: {"dp_replicate": 2}, 4: {"dp_replicate": 2, "dp_shard": 2}},
    "tp": {2: {"tp": 2}, 4: {"dp_shard": 2, "tp": 2}},
}


class Drawn(NamedTuple):
    """A random run."""

    dim: int
    layers: int
    vocab: int
    seq_len: int
    microbatch: int
    microbatches: int  # over all ranks
    recompute: str
    mesh: str  # a key of _MESHES

    def degrees(self, ranks: int) -> dict[str, int]:
        """The degrees of Choice; those that are 1 are left out."""
        return _MESHES[self.mesh].get(ranks, {})

    def global_batch(self, ranks: int) -> int:
        """Sequences: those of `microbatches`, or one microbatch a rank where that is more."""
        degrees = self.degrees(ranks)
        return self.microbatch * max(self.microbatches, degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1))

    def config(self, ranks: int) -> Config:
        heads = self.dim // 32
        overrides = {"dim": self.dim, "n_layers": self.layers, "n_heads": heads, "n_kv_heads": heads // 2, "head_dim": 32}
        overrides |= {"ffn_dim": 3 * self.dim, "vocab_size": self.vocab}
        keys = {"dp_shard": "data_parallel_shard", "dp_replicate": "data_parallel_replicate", "tp": "tensor_parallel"}
        degrees = {f"{key}_degree": self.degrees(ranks).get(name, 1) for name, key in keys.items()}
        training: dict[str, Any] = {"seq_len": self.seq_len, "local_batch_size": self.microbatch, "steps": _STEPS}
        training |= {"global_batch_size": self.global_batch(ranks), "mixed_precision_param": "float32"}
        return Config.model_validate(
            {
                "model": {"name": "llama3", "flavor": "debug", "overrides": overrides},
                "training": training,
                "parallelism": degrees,
                "activation_checkpoint": {"mode": self.recompute},
            }
        )


def drawn(number: int) -> Drawn:
    draw = random.Random(f"plan_cpu {number}")
    run = Drawn(
        draw.choice([128, 192, 256, 384]),
        draw.choice([2, 4, 6]),
        draw.choice([512, 2048, 4096]),
        draw.choice([128, 256, 512]),
        draw.choice([1, 2, 4]),
        draw.choice([2, 4]),
        draw.choice(["none", "full", "selective"]),
        draw.choice(list(_MESHES)),
    )
    return run._replace(mesh="dp_shard") if run.mesh == "tp" and run.dim == 192 else run  # two ranks cannot split 3 KV heads


class Measured(NamedTuple):
    """Measurements of a rank. seconds, cpu: wall time and CPU time of the shortest step. held: resident bytes."""

    seconds: float
    cpu: float
    held: int


def measure(device: torch.device, config: Config, steps: int, mapped: bool = False) -> tuple[float, float, int]:
    """The values of Measured for a run, after a tiny run on the same mesh that loads libraries and their buffers."""
    if mapped:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**13)
    small = {**config.model.overrides, "dim": 64, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 512}
    train(device, config.model_copy(update={"model": config.model.model_copy(update={"overrides": small})}), 2)
    gc.collect()  # the tiny run's model, which would otherwise be freed during the other one
    before = _resident("VmRSS")
    seconds, cpu = train(device, config, steps)
    return seconds, cpu, _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Bytes of this process, now or at its peak, by Linux."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_cpu", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", choices=[1, 2, 4], default=[1, 2, 4])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--mapped", type=int, nargs=2, metavar=("RUN", "RANKS"), help="only a run's bytes, with the mappings")
    words = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # so that the threads of a rank are the same on any number of ranks
    if words.mapped:
        number, ranks = words.mapped
        print(on_ranks(ranks, measure, drawn(number).config(ranks), 3, True)[2])
        return
    titles = "run | ranks | step, ms | CPU ms | predicted | error | of CPU ms | MiB | mapped, MiB | predicted | error"
    titles += " | GFLOP/s | load"
    lines = [f"| {titles} |", "| - " * 13 + "|"]
    errors: dict[tuple[str, int], list[float]] = {}
    for ranks in words.ranks:
        for number in range(words.runs):
            run = drawn(number)
            config, turns = run.config(ranks), []
            for _ in range(_TURNS):
                text: str = on_ranks(ranks, calibrate, _CALIBRATION)
                device = Device.model_validate(parse_toml(text)["cpu"])
                found = Measured(*on_ranks(ranks, measure, config, _STEPS))
                choice = Choice(microbatch=run.microbatch, recompute=run.recompute, **run.degrees(ranks))
                turns.append((step(uncompiled_job(config, device), choice).total, found, device))
            expected, found, device = sorted(turns, key=lambda turn: turn[0] / turn[1].seconds)[_TURNS // 2]
            command = [sys.executable, "-m", "benchmarks.plan_cpu", "--mapped", str(number), str(ranks)]
            without = os.environ | {"MKL_DISABLE_FAST_MM": "1"}  # MKL's buffers; it reads the variable when it is loaded
            mapped = int(subprocess.run(command, env=without, stdout=subprocess.PIPE, check=True).stdout)
            load, size = os.getloadavg()[0], predicted(config, ranks, "cpu")
            pair = {"step": expected / found.seconds, "CPU time": expected / found.cpu, "memory": size / mapped}
            for name, ratio in pair.items():
                errors.setdefault((name, ranks), []).append(ratio - 1)
            step_error, cpu_error, memory_error = (f"{ratio - 1:+.1%}" for ratio in pair.values())
            batch = f"{run.global_batch(ranks) // run.microbatch} x {run.microbatch} x {run.seq_len}"
            what = f"dim {run.dim}, {run.layers} layers, vocabulary {run.vocab}, {batch}, {run.recompute}"
            what += "".join(f", {name} {degree}" for name, degree in run.degrees(ranks).items())
            times = f"{found.seconds * 1e3:.1f} | {found.cpu * 1e3:.1f} | {expected * 1e3:.1f} | {step_error} | {cpu_error}"
            bytes_held = f"{found.held / _MIB:.0f} | {mapped / _MIB:.0f} | {size / _MIB:.0f} | {memory_error}"
            lines.append(f"| {what} | {ranks} | {times} | {bytes_held} | {device.float32_tflops * 1e3:.0f} | {load:.1f} |")
            print(lines[-1], flush=True)
    lines += ["", "| | ranks | mean of errors | mean of their sizes |", "| - | - | - | - |"]
    for (name, ranks), each in errors.items():
        lines.append(f"| {name} | {ranks} | {statistics.mean(each):+.1%} | {statistics.mean(map(abs, each)):.1%} |")
    print("\n".join(lines))
    if words.output:
        words.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
