"""Sets up a rank: logging, device, process group, timeouts, random state; and functions that all ranks call together."""

import contextlib
import datetime
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlite.config.operation import Comm
from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.ground.errors import UserError
from titanlite.launch import addresses
from titanlite.launch.agreement import Identity, agree
from titanlite.launch.layout import OF_A_RANK, STORE_OF_START, log_ranks, number, rank_and_world

Result = TypeVar("Result")

_REACHED_WITHIN = 10.0  # seconds for a store that is there already
_TOKENIZING = 24 * 3600  # seconds that a node may need longer than another one; a rank that dies is noticed at once


def set_up_logging() -> None:
    """Messages to standard error from the ranks that LOG_RANK lists (default 0); warnings from every rank.

    Standard output is for the output of commands.
    """
    rank, world = rank_and_world()
    chosen = log_ranks(world)
    prefix = f"[rank {rank}] " if (world > 1 and chosen != [0]) or rank not in chosen else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("titanlite")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank in chosen else logging.WARNING)


def start(config: Config, identity: Identity) -> torch.device:
    """Chooses the device and joins the process group; returns the device.

    Raises UserError if there are more ranks on this machine than GPUs, if ranks or nodes cannot reach each other, or if
    another node has another `identity`.
    """
    rank, world = rank_and_world()
    if world > number("LOCAL_WORLD_SIZE", world) and (fault := addresses.hostname_fault()):
        raise UserError(fault)
    local_rank = number("LOCAL_RANK")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"rank {rank} needs GPU {local_rank}, and {torch.cuda.device_count()} are visible")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if config.training.deterministic:
        use_deterministic_algorithms()
    if fault := addresses.set_up_gloo():
        raise UserError(fault)
    timeout = datetime.timedelta(seconds=config.comm.init_timeout_seconds)
    store = _store(rank, world, timeout)
    if world > 1:
        agree(store, rank, world, identity)
    # No device_id: with it, PyTorch splits each mesh dimension off this group, its gloo part too, and each split waits for all
    # ranks at the store (PyTorch pull request 182057). Older versions refuse two backends there (issue 159200). `barrier` does
    # not need it: in a group with gloo it synchronizes by gloo. NCCL connects at its first collective, within
    # init_timeout_seconds.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    return device


def _store(rank: int, world: int, timeout: datetime.timedelta) -> dist.Store:
    """The store of the process group: that of torchrun or our launcher, else of rank 0. A single rank needs no address.

    PyTorch's env:// waits minutes for a wrong address, and then prints frames of C++. It also gives the ranks that torchrun
    restarts what the dead ones have left in the store, such as their addresses: torchrun has one store for all starts.
    """
    if world == 1:
        return dist.HashStore()
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(f"WORLD_SIZE={world} without {' and '.join(missing)}; {OF_A_RANK}")
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if rank == 0 and not of_launcher:
            return addresses.serve(host, port, timeout)
        joined = addresses.join(host, port, _REACHED_WITHIN if of_launcher else timeout.total_seconds(), timeout)
    except ConnectionError as error:
        address = f"MASTER_ADDR={host}, MASTER_PORT={port}"
        raise UserError(f"{address}: rank {rank} does not reach the store of rank 0 there: {error}; {OF_A_RANK}") from None
    if not of_launcher or STORE_OF_START in os.environ:
        return joined
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", joined)


def use_deterministic_algorithms() -> None:
    """The same bits from every run; before anything is computed on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def set_timeout(seconds: int, but: dist.ProcessGroup | None = None) -> None:
    """The timeout of every process group from now on, except one that has its own."""
    for group in [group for group in torch_private.all_groups if group is not but]:
        torch_private.set_group_timeout(datetime.timedelta(seconds=seconds), group)


@contextlib.contextmanager
def longer_than_a_step(comm: Comm, but: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Around what loads or compiles: `set_timeout` to that of the start, and back to that of a step."""
    set_timeout(comm.init_timeout_seconds, but)
    yield
    set_timeout(comm.train_timeout_seconds, but)


@contextlib.contextmanager
def after_other_nodes(comm: Comm) -> Iterator[None]:
    """Around the first collectives after `once_per_node`: a node with a cache of its own may tokenize for hours longer."""
    set_timeout(_TOKENIZING)
    yield
    set_timeout(comm.init_timeout_seconds)


def seed_step(seed: int, step: int, part: int) -> None:
    """Random state of a step, for dropout and the like: a function of seed, step and the rank's part of the batch.

    So it needs no checkpoint: a resumed run draws what the uninterrupted one would have drawn.
    """
    digest = hashlib.blake2b(f"step {seed}/{step}/{part}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Around what each rank does by itself: all ranks of a group raise the UserError of any rank.

    Otherwise the others would wait in the next collective. A process outside of any group raises its own.
    """
    error = None
    try:
        yield
    except UserError as raised:
        error = raised
    if faults := [each for each in of_all_ranks(error, group) if each is not None]:
        kind = type(faults[0]) if len({type(error) for error in faults}) == 1 else UserError
        raise kind("\n".join(dict.fromkeys(str(error) for error in faults))) from None


def of_all_ranks(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """The value of each rank of a group, in their order; a process outside of any group has its own. Values are pickled."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def of_first_rank(value: Result, group: dist.ProcessGroup | None = None) -> Result:
    """The value of a group's first rank, on all of them. It is pickled."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def same_everywhere(value: str) -> bool:
    """Whether all processes hold the same text."""
    return len(set(of_all_ranks(value))) == 1


def once_per_node(make: Callable[[], Result]) -> Result:
    """Calls `make` on the first rank of each node; -> its result on every rank of the node. All ranks together.

    All ranks of the node raise the UserError that `make` raises. The result is pickled.
    """
    local_rank, local_world = number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")
    if local_world == 1:
        return make()
    first = dist.get_rank() - local_rank
    # The group stays until the end: its name is a hash of its ranks, and a second one of that name would connect to the
    # addresses of the first, which are still in the store.
    node = dist.new_group(
        list(range(first, first + local_world)),
        backend="gloo",
        timeout=datetime.timedelta(days=30),  # `make` may tokenize for hours; the launcher ends the ranks that wait in vain
        use_local_synchronization=True,
    )
    answer: Any = None
    with together(node):
        if local_rank == 0:
            answer = make()
    return of_first_rank(answer, node)


def faults(local_ranks: int) -> Iterator[str]:
    """More ranks on this machine than it has GPUs."""
    gpus = torch.cuda.device_count()
    if gpus and local_ranks > gpus:
        yield f"NGPU = {local_ranks}: this machine has {gpus} visible GPUs"
