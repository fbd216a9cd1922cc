"""Ranks of a tool on this machine: processes in one group, on its GPUs where there are enough of them, else on the CPU."""

import datetime
import logging
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from titanlite.errors import UserError
from titanlite.launch import children

_USER_ERROR = 2  # exit code of a rank that raised UserError


def on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: int = 300, use_gpus: bool = True
) -> Any:
    """The result of function(device, *arguments) on rank 0 of `count` new processes, all of which run it.

    New processes must be able to import the function, and pickle must take arguments and result. Raises the UserError that a
    rank raised.
    """
    # The ranks of all calls are forks of one process that has only imported PyTorch, which takes longer than all the rest.
    set_forkserver_preload([function.__module__])
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of each rank that it ends
    cuda = use_gpus and torch.cuda.device_count() >= count
    with tempfile.TemporaryDirectory() as folder:
        words = (count, cuda, folder, timeout_seconds, function, arguments)
        try:
            multiprocessing.start_processes(_rank, words, nprocs=count, start_method="forkserver")
        except multiprocessing.ProcessExitedException as ended:
            if ended.exit_code == _USER_ERROR and (errors := sorted(Path(folder).glob("error-*"))):
                raise UserError(errors[0].read_text(encoding="utf-8")) from None
            raise
        return torch.load(Path(folder) / "result", weights_only=False)  # written by rank 0 a moment ago


def _rank(
    rank: int, count: int, cuda: bool, folder: str, timeout_seconds: int, function: Callable[..., Any], arguments: tuple
) -> None:
    children.end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the starter ends, then these
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}  # as torchrun sets them
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    # gathering whole tensors for a comparison is slow on purpose
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # PyTorch's own warnings, one a rank, would break the table of a tool; whatever they warn of changes what the tool compares
    warnings.filterwarnings("ignore", module=r"torch\.")
    store = dist.FileStore(f"{folder}/store", count)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    try:
        result = function(device, *arguments)
    except UserError as error:
        (Path(folder) / f"error-{rank:05d}").write_text(str(error), encoding="utf-8")
        os._exit(_USER_ERROR)  # not sys.exit: the other ranks may be waiting in a collective, and the starter ends them
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    dist.barrier()
    dist.destroy_process_group()
