"""Ranks of a tool on this machine: processes in one group, on its GPUs where there are enough of them, else on the CPU."""

import datetime
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from titanlite.errors import UserError
from titanlite.launch import children

_FAULT = 2  # exit code of a rank that has met a fault of the user's


def on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: int = 300, use_gpus: bool = True
) -> Any:
    """What function(device, *arguments) returns on rank 0 of `count` new processes, all of which run it.

    The function must be one that a new process can import, and arguments and result such as pickle takes. Raises the UserError
    that a rank has met.
    """
    # The ranks of all calls are forks of one process that has only imported PyTorch, which takes longer than all the rest.
    set_forkserver_preload([function.__module__])
    cuda = use_gpus and torch.cuda.device_count() >= count
    with tempfile.TemporaryDirectory() as folder:
        words = (count, cuda, folder, timeout_seconds, function, arguments)
        try:
            multiprocessing.start_processes(_rank, words, nprocs=count, start_method="forkserver")
        except multiprocessing.ProcessExitedException as ended:
            if ended.exit_code == _FAULT and (faults := sorted(Path(folder).glob("fault-*"))):
                raise UserError(faults[0].read_text(encoding="utf-8")) from None
            raise
        return torch.load(Path(folder) / "result", weights_only=False)  # written a moment ago by ourselves


def _rank(
    rank: int, count: int, cuda: bool, folder: str, timeout_seconds: int, function: Callable[..., Any], arguments: tuple
) -> None:
    children.end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all: it ends the starter, and that ends these
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    # gathering whole tensors for a comparison is slow on purpose
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    store = dist.FileStore(f"{folder}/store", count)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    try:
        result = function(device, *arguments)
    except UserError as error:
        (Path(folder) / f"fault-{rank:05d}").write_text(str(error), encoding="utf-8")
        os._exit(_FAULT)  # not sys.exit: the other ranks may be waiting in a collective, and are ended from outside
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    dist.barrier()
    dist.destroy_process_group()
