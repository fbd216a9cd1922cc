"""Reads the nodes and ranks of a run from the environment variables that the header of run_train.sh explains."""

import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from titanlite.ground.errors import UserError

# The whole numbers of the environment: (least, most, default). torchrun sets those of a rank.
_NUMBERS = {
    "NGPU": (1, 1024, 1),
    "NNODES": (1, 100_000, 1),
    "NODE_RANK": (0, 99_999, 0),
    "MAX_RESTARTS": (0, 1_000_000, 0),
    "RDZV_TIMEOUT": (1, 604_800, 600),
    "OMP_NUM_THREADS": (1, 65_536, 1),
    "RANK": (0, 10**8, 0),
    "LOCAL_RANK": (0, 10**8, 0),
    "WORLD_SIZE": (1, 10**8, 1),
    "LOCAL_WORLD_SIZE": (1, 10**8, 1),
    "MASTER_PORT": (1, 65_535, 29_500),
}
OF_A_RANK = (  # for messages
    "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank; if another "
    "launcher has left them, unset them"
)
# The launcher sets these variables for each rank, or they are options of torchrun. If they are set before, another launcher has
# left them.
_LEFT = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|USE_AGENT_STORE)"
    "|PET_.*"
)
STORE_OF_START = "TITANLITE_STORE_OF_START"  # the environment of ranks whose launcher has a new store for each start
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # of version 2, and 1
_LOCAL = ("localhost", "127.0.0.1", "[::1]")  # hosts of an endpoint whose launchers are all on this node


class Layout(NamedTuple):
    """How many ranks this node and the others run, and where the nodes meet."""

    local_ranks: int  # on this node
    nodes: int
    node: int  # the number of this one, from 0
    host: str  # a name or an address of node 0
    port: int
    address: str  # of this node, for the ranks of the others; empty: its hostname
    max_restarts: int
    patience: int  # seconds for which the nodes wait for each other


def read_layout() -> Layout:
    """The layout that the environment describes; calls `share_threads`. Raises UserError."""
    local_ranks, nodes, node = number("NGPU"), number("NNODES"), number("NODE_RANK")
    if node >= nodes:
        raise UserError(f"NODE_RANK={node}: there are NNODES={nodes} nodes, numbered from 0")
    if nodes > 1 and not os.environ.get("RDZV_ENDPOINT"):
        raise UserError(f"NNODES={nodes} needs RDZV_ENDPOINT=host:port, an address of the node with NODE_RANK=0")
    host, port = _endpoint(endpoint) if (endpoint := os.environ.get("RDZV_ENDPOINT")) else ("localhost", 0)
    log_ranks(local_ranks * nodes)
    share_threads(local_ranks)
    address = os.environ.pop("PET_LOCAL_ADDR", "") if nodes > 1 else ""
    _drop_left_over()
    address = address or ("localhost" if host in _LOCAL else "")
    return Layout(local_ranks, nodes, node, host, port, address, number("MAX_RESTARTS"), number("RDZV_TIMEOUT"))


def _drop_left_over() -> None:
    """Names the variables of another launcher on standard error, and removes them from the environment."""
    if left := sorted(filter(_LEFT.fullmatch, os.environ)):
        values = ", ".join(f"{name}={shown(os.environ.pop(name))}" for name in left)
        print(f"ignored, from another launcher: {values}; set NGPU, NNODES and NODE_RANK instead", file=sys.stderr)


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes, as the launcher has set them; (0, 1) without a launcher.

    Raises UserError for variables that contradict each other, such as a RANK that an earlier launcher has left.
    """
    rank, world = number("RANK"), number("WORLD_SIZE")
    local_rank, local_world = number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE", world)
    if world > 1 and not os.environ.get("RANK"):
        raise UserError(f"WORLD_SIZE={world} without RANK; {OF_A_RANK}")
    if not (rank < world and local_rank <= rank and local_rank < local_world <= world):
        found = f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world}"
        raise UserError(f"{found}: contradict each other; {OF_A_RANK}")
    return rank, world


def number(name: str, default: int | None = None) -> int:
    """A whole number of the environment, its default where it is not set. Raises UserError, which names the variable."""
    least, most, usual = _NUMBERS[name]
    text = os.environ.get(name)
    if not text:
        return usual if default is None else default
    value = whole_number(text, least, most)
    if value is None:
        raise UserError(f"{name}={shown(text)}: must be a whole number from {least} to {most}, without leading zeros")
    return value


def log_ranks(ranks: int) -> list[int]:
    """The ranks that log. Raises UserError. ranks: of the run."""
    text = os.environ.get("LOG_RANK") or "0"
    chosen = [whole_number(rank, 0, ranks - 1) for rank in text.split(",")]
    if None in chosen:
        raise UserError(
            f"LOG_RANK={shown(text)}: must be a rank or a list of ranks, such as 0 or 0,3, without leading zeros; "
            f"the last rank is {ranks - 1}"
        )
    return [rank for rank in chosen if rank is not None]


def share_threads(ranks: int) -> None:
    """Sets OMP_NUM_THREADS where it is not set: `cores` shared among the ranks of this node. Raises UserError."""
    os.environ["OMP_NUM_THREADS"] = str(number("OMP_NUM_THREADS", max(1, cores() // ranks)))


def cores() -> int:
    """Those that this process may use: a scheduler, or a container's quota of CPU time, may give it a part of the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return next((min(count, math.ceil(quota)) for quota in map(_quota, _QUOTAS) if quota > 0), count)


def _quota(files: tuple[str, ...]) -> float:
    """The CPU time of a control group, relative to wall time; 0 or less: no limit."""
    try:
        quota, period = " ".join((_CONTROL_GROUP / name).read_text() for name in files).split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return 0.0


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that decimal digits without leading zeros spell, if it is within the bounds.

    010 is 8 for a shell and 10 for Python, 08 is an error for a shell, and other scripts have digits too: none is accepted.
    """
    if len(text) > len(str(most)) or not re.fullmatch(r"0|[1-9][0-9]*", text, re.ASCII):
        return None
    return value if least <= (value := int(text)) <= most else None


def shown(text: str) -> str:
    """A wrong value for a message: on one line, at most 60 characters."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _endpoint(text: str) -> tuple[str, int]:
    """(host, port) of RDZV_ENDPOINT; an IPv6 address is in brackets."""
    host, _, digits = text.rpartition(":")
    port = whole_number(digits, 1, 65_535)
    if port is None or not re.fullmatch(r"[\w.-]{1,253}|\[[0-9a-fA-F:.%\w]+\]", host, re.ASCII):
        raise UserError(f"RDZV_ENDPOINT={shown(text)}: must be host:port, such as first:29500, with a port from 1 to 65535")
    return host, port
