"""Nodes that would train different runs, and machines without a network, end within seconds with one message."""

import json
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


def test_launchers_with_another_configuration_and_other_code_end_on_all_nodes(folder):
    other = folder / "other"
    for name in ("titanlite", "models", "run_train.sh"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, other.mkdir(exist_ok=True) or other / name)
    with open(other / "titanlite/loop/loss.py", "a") as file:
        file.write("CHANGED = True\n")
    nodes = [("0", ROOT, []), ("1", other, ["--optimizer.lr", "2e-3", "--lr_scheduler.warmup_steps", "1"])]
    variables = {"NNODES": "2", "NGPU": "2", "RDZV_ENDPOINT": f"localhost:{free_port()}", "OMP_NUM_THREADS": "1"}
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


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--training.seed", "7"], 2), (["--job.dump_folder", "./out/."], 0)],
    ids=["another seed", "another path to the same folder"],
)
def test_ranks_that_torchrun_starts_are_compared_too(folder, words, code):
    """With torchrun each node has its own store; here rank 0 serves it, as if a scheduler sets the variables of ranks."""
    same = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    same |= {"MASTER_PORT": str(free_port()), "RDZV_ENDPOINT": "localhost:1"}  # all on this machine
    nodes = [
        Command("train", "run.toml", *more, folder=folder, RANK=number, GROUP_RANK=number, **same)
        for number, more in (("0", []), ("1", words))
    ]
    ended = [node.finish() for node in nodes]
    assert [end.code for end in ended] == [code] * 2, ended
    said = "node 1 has training.seed = 7, node 0 has 0"
    assert [said in end.err for end in ended] == [code == 2] * 2
    if code == 0:
        assert len((folder / "out/metrics.jsonl").read_text().splitlines()) == 3


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


@pytest.mark.slow
def test_one_rank_trains_despite_variables_of_another_launcher(folder):
    left = {"PET_LOCAL_ADDR": "203.0.113.5", "MASTER_ADDR": "203.0.113.5", "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "8"}
    left |= {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ended = finish(launch("run.toml", folder=folder, **left))
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "ignored, from another launcher: MASTER_ADDR=203.0.113.5, MASTER_PORT=1" in ended.err
    assert [json.loads(line)["step"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
