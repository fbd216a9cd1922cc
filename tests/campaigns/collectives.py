"""Collectives among ranks that are paused at random instants: all results are right, and no rank dies or waits for ever.

With the two threads that PyTorch gives to a gloo group, ranks died in four runs of six, each within two minutes.
"""

import random
import threading
import time
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tests.campaigns import Report
from tests.campaigns.pauses import pause
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import mesh_of

SEEDS = range(10)
_ROUND, _ROUNDS = 500, 30  # collectives of a call, calls of a seed
_SIZES = (1, 7, 64, 300, 5000, 70000)  # elements; the smallest leave most of gloo's time to its threads' bookkeeping


def collectives(seed: int) -> None:
    """Those of training with FSDP and TP, among all ranks and among two, in an order that all ranks draw alike."""
    warnings.simplefilter("ignore", FutureWarning)  # 2.11 knows no other name of reduce_scatter_tensor
    draw = random.Random(seed)
    mesh = mesh_of({"dp_shard": 2, "tp": 2})
    shard, tp = mesh.get_group("dp_shard"), mesh.get_group("tp")
    for _ in range(_ROUND):
        part = torch.ones(draw.choice(_SIZES))
        whole = torch.ones(2 * len(part))
        match draw.randrange(4):
            case 0:
                dist.all_reduce(part)
                assert part.eq(4).all()
            case 1:
                assert DTensor.from_local(part, mesh["tp"], [Shard(0)], run_check=False).full_tensor().eq(1).all()
            case 2:
                dist.all_reduce(part, group=shard)
                assert part.eq(2).all()
            case 3:  # a norm is summed while gradients are reduced
                work = dist.reduce_scatter_tensor(part, whole, group=tp, async_op=True)
                norm = torch.ones(1)
                dist.all_reduce(norm)
                work.wait()
                assert norm.eq(4).all() and part.eq(2).all()


def play(seed: int) -> Report:
    pool, ended, begun = Pool(4), threading.Event(), time.monotonic()
    pool.run("tests.campaigns.collectives:collectives", seed=-1)

    def pauses() -> None:
        while not ended.wait(random.expovariate(2)):
            with suppress(OSError, IndexError):  # it has ended
                pause(random.choice(pool.workers).pid, ended)

    threading.Thread(target=pauses, daemon=True).start()
    faults = []
    try:
        for number in range(_ROUNDS):
            pool.run("tests.campaigns.collectives:collectives", seed=seed * _ROUNDS + number)
    except WorkerFailure as failure:
        faults = [str(failure)]
    finally:
        ended.set()
        pool.stop()
    return Report({"collectives": _ROUND * _ROUNDS, "seconds": round(time.monotonic() - begun)}, faults)
