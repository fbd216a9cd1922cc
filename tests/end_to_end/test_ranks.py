"""Ranks of a tool: their result, their errors, and that they end with the command in every case."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from tests.end_to_end.launcher import ROOT
from tests.waiting import PATIENCE, until
from titanlite.ground.errors import UserError
from titanlite.launch.local_ranks import on_ranks

HERE = "tests.end_to_end.test_ranks"


def refused(device: torch.device) -> None:
    if dist.get_rank() == 1:
        raise UserError("rank 1 has met it")
    dist.barrier()


def broken(device: torch.device) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("does not fit\nand more")
    dist.barrier()  # fails as well, since rank 1 is gone


def killed(device: torch.device) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def waiting(device: torch.device, folder: Path) -> None:
    (folder / f"{dist.get_rank()}.tmp").write_text(str(os.getpid()))
    (folder / f"{dist.get_rank()}.tmp").rename(folder / f"{dist.get_rank()}.pid")
    time.sleep(600)


def test_a_user_error_in_any_rank_is_raised_as_one():
    with pytest.raises(UserError, match=r"^rank 1 has met it$"):
        on_ranks(2, refused, use_gpus=False)


def test_the_original_error_of_any_rank_is_reported_in_one_line_with_its_location():
    line = 1 + Path(__file__).read_text().splitlines().index('        raise RuntimeError("does not fit\\nand more")')
    with pytest.raises(UserError) as raised:
        on_ranks(2, broken, use_gpus=False)
    where = rf"rank 1 of 2, starting: {re.escape(__file__)}, line {line}"
    assert re.fullmatch(rf"{where}: RuntimeError: does not fit; traceback: \S+", str(raised.value))


def test_a_killed_rank_is_named_with_the_likely_cause():
    with pytest.raises(UserError, match=r"process 1 terminated with signal SIGKILL; .* if memory runs out"):
        on_ranks(2, killed, use_gpus=False)


def test_a_killed_rank_is_named_and_not_the_lost_connection_of_another(monkeypatch):
    def start(_, words, **__):
        (Path(words[2]) / "error-0000-0").write_text("Connection closed by peer")
        raise ProcessExitedException("process 1 terminated", 1, 1234, -signal.SIGKILL, "SIGKILL")

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    with pytest.raises(UserError, match=r"process 1 terminated; .* if memory runs out"):
        on_ranks(2, killed, use_gpus=False)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no such file; or no such process, where it ends between opening and reading
        return False


def test_no_rank_outlives_the_command(tmp_path):
    program = f"from {HERE} import *; on_ranks(2, waiting, Path({str(tmp_path)!r}), use_gpus=False)"
    main = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, lambda: main.poll() is None)
    ranks = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert all(map(_alive, ranks))
    main.kill()
    main.wait(PATIENCE)
    until(lambda: not any(map(_alive, ranks)))
