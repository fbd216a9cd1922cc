"""Nodes that would train different runs, and machines without a network, end within seconds with one message."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.forked import Command
from tests.end_to_end.launcher import ROOT, finish, free_port, launch
from tests.end_to_end.test_run_train import working_folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return working_folder(tmp_path)


@pytest.mark.slow  # the comparison itself is that of the test below
def test_launchers_with_another_configuration_and_other_code_end_on_all_nodes(folder):
    other = folder / "other"
    for name in ("titanlite", "models", "run_train.sh"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, other.mkdir(exist_ok=True) or other / name)
    with open(other / "titanlite/loop/loss.py", "a") as file:
        file.write("CHANGED = True\n")
    nodes = [("0", ROOT, []), ("1", other, ["--optimizer.lr", "2e-3", "--lr_scheduler.warmup_steps", "1"])]
    variables = {"NNODES": "2", "NGPU": "1", "RDZV_ENDPOINT": f"localhost:{free_port()}", "OMP_NUM_THREADS": "1"}
    started = [
        launch("run.toml", *words, folder=folder, script=root / "run_train.sh", NODE_RANK=number, **variables)
        for number, root, words in nodes
    ]
    ended = [finish(each, 120) for each in started]
    assert [(end.code, end.left) for end in ended] == [(2, [])] * 2, ended
    for end in ended:
        assert "node 1 has optimizer.lr = 0.002, node 0 has 0.0008" in end.err
        assert "node 1 has lr_scheduler.warmup_steps = 1, node 0 has 0" in end.err
        assert "node 1 has code.titanlite/loop/loss.py = " in end.err and "Traceback" not in end.err
    assert not list((folder / "out/checkpoint").glob("step-*"))


def test_ranks_that_torchrun_starts_are_compared_too(folder):
    """With torchrun each node has its own store; here rank 0 serves it, as if a scheduler sets the variables of ranks."""
    same = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    same |= {"MASTER_PORT": str(free_port()), "RDZV_ENDPOINT": "localhost:1"}  # all on this machine
    nodes = [
        Command("train", "run.toml", "--training.seed", seed, folder=folder, RANK=number, GROUP_RANK=number, **same)
        for number, seed in (("0", "0"), ("1", "7"))
    ]
    for ended in [node.finish() for node in nodes]:
        assert ended.code == 2 and "node 1 has training.seed = 7, node 0 has 0" in ended.err, ended.err


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("1", "gloo has no address to listen at"),
        pytest.param("2", "node 0 does not reach itself at localhost", marks=pytest.mark.slow),
    ],
)
def test_without_a_loopback_interface_a_run_ends_with_the_remedy(folder, ranks, said):
    unshare = shutil.which("unshare")
    attempt = unshare and subprocess.run([unshare, "-n", "true"], capture_output=True, text=True)
    if not attempt or attempt.returncode:
        pytest.skip(f"no network namespace: {attempt.stderr.strip() if attempt else 'the command unshare is missing'}")
    ended = finish(launch("-n", str(ROOT / "run_train.sh"), "run.toml", folder=folder, script=Path(unshare), NGPU=ranks), 100)
    assert (ended.code, ended.left) == (2, []), ended.err
    assert said in ended.err and "ip link set lo up" in ended.err
    assert "frame #" not in ended.err and "Traceback" not in ended.err
