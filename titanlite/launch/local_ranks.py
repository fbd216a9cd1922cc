"""Starts the ranks of a command on this machine, in one process group: on its GPUs if there are enough of them, else on CPU."""

import datetime
import logging
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from titanlite.config.bounds import MOST_LOCAL_RANKS
from titanlite.ground.errors import UserError
from titanlite.ground.files import replace_file
from titanlite.launch import children, failure
from titanlite.launch.addresses import set_up_gloo
from titanlite.registry.family import location_of

_HINT = "; under tensor parallelism a parameter is a DTensor: use local_weight(parameter) of models/blocks.py"
_KILLED = "; the system kills a process if memory runs out: use a smaller model, batch or mesh"


def on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: int = 300, use_gpus: bool = True
) -> Any:
    """The result of function(device, *arguments) on rank 0 of `count` new processes, all of which run it.

    New processes must be able to import the function, and pickle must take arguments and result. Raises UserError for the first
    error of any rank, since the function runs the user's model on the user's data, and for a rank that was killed.
    """
    if count > MOST_LOCAL_RANKS:
        raise UserError(f"{count} ranks are more than a command starts on this machine, {MOST_LOCAL_RANKS}")
    # The ranks of all calls are forks of one process that has only imported PyTorch, which takes longer than all the rest.
    # FSDP2 and DTensor import dynamo when they are first used: a second of each rank.
    set_forkserver_preload([function.__module__, "torch._dynamo"])
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of each rank that it ends
    cuda = use_gpus and torch.cuda.device_count() >= count
    with tempfile.TemporaryDirectory() as folder:
        words = (count, cuda, folder, timeout_seconds, function, arguments)
        try:
            with children.naming_long_folder():
                multiprocessing.start_processes(_rank, words, nprocs=count, start_method="forkserver")
        except multiprocessing.ProcessExitedException as ended:
            # a rank that the system has killed has none, and those of the others follow from that
            killed = ended.signal_name == "SIGKILL"
            if not killed and (errors := sorted(Path(folder).glob("error-*[0-9]"))):  # the later ones follow from the first
                raise UserError(errors[0].read_text(encoding="utf-8")) from None
            raise UserError(f"{ended}{_KILLED if killed else ''}") from None
        return torch.load(Path(folder) / "result", weights_only=False)  # written by rank 0 a moment ago


def _rank(
    rank: int, count: int, cuda: bool, folder: str, timeout_seconds: int, function: Callable[..., Any], arguments: tuple
) -> None:
    children.end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the starter ends, then these
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # of an earlier launcher
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}  # as torchrun sets them
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    # gathering whole tensors for a comparison is slow on purpose
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # PyTorch's warnings, one per rank, would break the table of a command; the comparison itself shows their effects
    warnings.filterwarnings("ignore", module=r"torch\.")
    store = dist.FileStore(f"{folder}/store", count)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        if fault := set_up_gloo():
            raise UserError(fault)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
        result = function(device, *arguments)
        if rank == 0:
            torch.save(result, Path(folder) / "result")
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        begun, text = time.monotonic_ns(), describe_error(error)
        if not isinstance(error, UserError):
            text = failure.report(error, f"rank {rank} of {count}", words=text)
        replace_file(Path(folder) / f"error-{begun:020d}-{rank}", text)  # this rank may be ended while it writes
        os._exit(2)  # not sys.exit: the other ranks may be waiting in a collective, and the starter ends them


def describe_error(error: Exception) -> str:
    """An error in one line, with the line of the model's code that led to it; of a UserError its own text."""
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    module = f", {path}" if (path := _module_of(error)) else ""
    hint = _HINT if "mixed torch.Tensor and DTensor" in text else ""
    return f"{location_of(error)}{module}: {type(error).__name__}: {text.splitlines()[0] if text else ''}{hint}"


def _module_of(error: BaseException) -> str:
    """The path of the innermost module whose forward pass raised an error; "" outside of a model's forward pass."""
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [module for module in frames if isinstance(module, nn.Module)]
    paths = {id(module): path for path, module in modules[0].named_modules()} if modules else {}
    return next((paths[id(module)] for module in reversed(modules) if paths.get(id(module))), "")
