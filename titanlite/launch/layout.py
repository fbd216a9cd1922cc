"""Where the ranks of a run are, from the environment variables that the header of run_train.sh explains."""

import os
import re
from typing import NamedTuple

from titanlite.errors import UserError


class Layout(NamedTuple):
    """How many ranks this machine and the others run, and where the machines meet."""

    local_ranks: int  # on this machine
    machines: int
    machine: int  # the number of this one, from 0
    endpoint: str  # host:port of machine 0
    address: str | None  # of this machine, where its hostname leads to another one
    max_restarts: int


def read_layout() -> Layout:
    """The layout that the environment describes; sets OMP_NUM_THREADS where it is not set. Raises UserError."""
    local_ranks, machines = _whole_number("NGPU", 1), _whole_number("NNODES", 1)
    machine, max_restarts = _whole_number("NODE_RANK", 0), _whole_number("MAX_RESTARTS", 0)
    endpoint = os.environ.get("RDZV_ENDPOINT") or "localhost:0"
    logging = os.environ.get("LOG_RANK") or "0"
    if machine >= machines:
        raise UserError(f"NODE_RANK={machine}: there are NNODES={machines} machines, numbered from 0")
    if machines > 1 and endpoint == "localhost:0":
        raise UserError(f"NNODES={machines} needs RDZV_ENDPOINT=host:port, an address of the machine with NODE_RANK=0")
    if not re.fullmatch(r"\d+(,\d+)*", logging) or max(map(int, logging.split(","))) >= local_ranks * machines:
        last = local_ranks * machines - 1
        raise UserError(f"LOG_RANK={logging}: must be a rank or a list of ranks, such as 0 or 0,3; the last one is {last}")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local_ranks)))
    return Layout(local_ranks, machines, machine, endpoint, os.environ.get("PET_LOCAL_ADDR"), max_restarts)


def _whole_number(name: str, least: int) -> int:
    """A variable of the environment; `least` is also its default."""
    text = os.environ.get(name) or str(least)
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise UserError(f"{name}={text}: must be a whole number, at least {least}")
    return int(text)
