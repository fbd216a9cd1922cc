"""Small collectives that overlap within a group, one after another: all results are right, and no rank dies or waits for ever.

With the two threads that PyTorch gives to a gloo group, three seeds of five failed: two with a damaged heap, and
one with a rank that waited. `options._threads` in titanlite/ground/torch_private.py sets them.
"""

import random
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tests.campaigns import Report
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import mesh_of

SEEDS = range(10)
_ROUND, _ROUNDS = 500, 20  # of a call, calls of a seed
_SIZES = (1, 7, 64)  # elements: the threads do little but keep their books
_LONGEST = 120.0  # seconds of a call, which takes a few


def collectives(seed: int) -> None:
    """All-gathers as DTensor does them, each during a reduce-scatter, as in FSDP."""
    warnings.simplefilter("ignore", FutureWarning)  # 2.11 knows no other name of reduce_scatter_tensor
    draw, mesh = random.Random(seed), mesh_of({"dp_shard": 2, "tp": 2})["tp"]
    for _ in range(_ROUND):
        part = torch.ones(draw.choice(_SIZES))
        work = dist.reduce_scatter_tensor(summed := part.clone(), part.repeat(2), group=mesh.get_group(), async_op=True)
        whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False).full_tensor()
        work.wait()
        assert whole.tolist() == [1.0] * 2 * len(part) and summed.tolist() == [2.0] * len(part)


def play(seed: int) -> Report:
    pool, begun, faults, rounds = Pool(4), time.monotonic(), [], 0
    try:
        for rounds in range(1, _ROUNDS + 1):
            pool.run("tests.campaigns.collectives:collectives", timeout=_LONGEST, seed=seed * _ROUNDS + rounds)
    except WorkerFailure as failure:
        faults = [str(failure)]
    finally:
        pool.stop()
    return Report({"collectives": 2 * _ROUND * rounds, "seconds": round(time.monotonic() - begun)}, faults)
