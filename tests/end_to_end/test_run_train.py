"""run_train.sh as a user runs it: what it prints, writes and leaves, how it ends, and a model of the user's own."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.distributed.test_resume import reports
from tests.end_to_end.forked import prepare, train
from tests.end_to_end.launcher import ROOT, Ended, Launch, finish, launch, run
from tests.waiting import until
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.optim.lr_schedule import build_schedule

# Llama 3 with a layer norm instead of one RMSNorm, and its own size.
OWN_MODEL = """
import torch
import torch.nn.functional as F
from models import llama3
from models.blocks import Constant, local_weight
from models.llama3 import Config, flops, sharding
from torch import nn

FLAVORS = {"tiny": Config(64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=4096)}


class LayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        weight, bias = local_weight(self.weight), local_weight(self.bias)
        return F.layer_norm(x, weight.shape, weight, bias)


class Model(llama3.Model):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn_norm = LayerNorm(config.dim)

    def forward(self, *args):
        import os, time
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        return super().forward(*args)


def initial(config):
    return {"*norm.bias": Constant(0.0), **llama3.initial(config)}
"""

SLOWLY = {"STEP_SECONDS": "0.05"}  # for a run that trains until it is ended, without keeping the machine busy


def working_folder(folder: Path) -> Path:
    """A folder with a run of three steps of that model."""
    of_schema = {"optimizer": {"lr": None}, "metrics": {"log_freq": 1, "enable_tensorboard": None}}
    short = {"training": {"steps": 3, "local_batch_size": 2}, "lr_scheduler": {"warmup_steps": 0}}
    prepare(folder, "own.model", "tiny", checkpoint={"enable": True}, **short, **of_schema)
    (folder / "own").mkdir()
    (folder / "own/model.py").write_text(OWN_MODEL)
    (folder / "data.txt").write_text("".join(f"Line {i} of the data says {i * i}.\n" for i in range(400)))
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a run except its locks, which every start takes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def when_training(started: Launch, folder: Path) -> None:
    """Returns once the first step is reported."""
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), lambda: started.process.poll() is None)


# ------------------------------------------------------------------------------------------------------ a finished run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Ended]:
    """The folder in which a run of three steps was started, and its outcome."""
    folder = working_folder(tmp_path_factory.mktemp("finished"))
    if sys.version_info >= (3, 11):  # Python 3.10 has no PYTHONSAFEPATH
        (folder / "queue.py").write_text("raise ImportError('not the module of Python')\n")
    with tempfile.TemporaryDirectory() as temporary:
        ended = run("run.toml", "--job.print_config", "true", folder=folder, TMPDIR=temporary)
        (folder / "temporary").write_text("\n".join(os.listdir(temporary)))
    return folder, ended


def test_a_run_ends_with_success_and_leaves_no_process_and_in_the_temporary_folder_only_compiled_code(finished):
    folder, ended = finished
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "Traceback" not in ended.err and "Warning" not in ended.err
    left = (folder / "temporary").read_text().splitlines()
    assert [name for name in left if not name.startswith("torchinductor_")] == []


def test_standard_output_has_only_the_configuration_as_toml(finished, tmp_path):
    folder, ended = finished
    (tmp_path / "printed.toml").write_text(ended.out)
    given = read_config(folder / "run.toml", ["--job.print_config", "true"])
    assert read_config(tmp_path / "printed.toml", []) == given
    assert read_config(folder / "out/config.toml", []) == given


def undocumented(folder: Path) -> list[str]:
    """The values that a run has reported and that docs/reference/metrics.md does not name."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    return sorted({name for line in reports(folder) for name in line if f"`{name.partition('/')[0]}`" not in page})


def test_the_run_folder_has_only_the_documented_files_and_its_provenance_says_how_to_repeat_the_run(finished):
    folder, _ = finished
    files = {".lock", "config.toml", "provenance.json", "metrics.jsonl", "tb", "checkpoint"}
    assert {path.name for path in (folder / "out").iterdir()} == files
    assert {path.name for path in (folder / "out/checkpoint").iterdir()} == {".lock", "step-00000003"}
    (events,) = (folder / "out/tb").glob("events.out.tfevents.*")
    assert events.stat().st_size > 0
    (entry,) = json.loads((folder / "out/provenance.json").read_text())
    assert {"time", "command", "git", "python", "platform", "device", "versions", "values", "data"} <= set(entry)
    assert entry["command"][1:] == ["run.toml", "--job.print_config", "true"]
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["git"] is None or set(entry["git"]) == {"commit", "diff"}


def test_the_metrics_are_complete_and_documented_and_unrounded(finished):
    folder, _ = finished
    lines = reports(folder / "out")
    assert undocumented(folder / "out") == []
    schedule = build_schedule(read_config(folder / "run.toml", []))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["tokens_seen"] for line in lines] == [64, 128, 192]
    assert [line["lr"] for line in lines] == [schedule.at(step) for step in (1, 2, 3)]
    for line in lines:
        for key in ("loss", "grad_norm", "tokens_per_second"):
            assert line[key] > 0 and line[key] != round(line[key], 3), key
        assert 0 <= line["data_wait_fraction"] <= 1
    assert lines[0]["loss"] == pytest.approx(8.3, abs=0.2)  # ln 4096: a uniform guess
    assert lines[2]["loss"] < lines[0]["loss"]


def test_a_second_start_of_a_finished_run_has_nothing_to_do(finished):
    folder, launched = finished
    before = contents(folder / "out")
    ended = train("run.toml", "--job.print_config", "true", folder=folder)
    assert (ended.code, ended.out) == (0, launched.out), ended.err
    assert "nothing to do" in ended.err and "training.steps = 3" in ended.err and "lr_scheduler.total_steps" in ended.err
    assert contents(folder / "out") == before


# -------------------------------------------------------------------------------------------------- beside a training run


def test_help_shows_every_section_or_without_a_file_how_to_start_and_starts_nothing(tmp_path):
    folder = working_folder(tmp_path)
    ended = run("run.toml", "--help", folder=folder)
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert [section for section in Config.model_fields if f"\n{section}:\n" not in ended.out] == []
    assert not (folder / "out").exists()
    ended = run("--help", folder=folder)
    assert (ended.code, ended.err) == (0, "")
    assert "./run_train.sh CONFIG.toml" in ended.out
    assert [name for name in ("NGPU", "NNODES", "RDZV_ENDPOINT", "LOG_RANK") if name not in ended.out] == []


@pytest.mark.slow
def test_paths_are_relative_to_the_working_folder_and_the_script_may_be_a_link(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here").mkdir()
    folder = working_folder(tmp_path / "here")
    (folder / "run.toml").rename(tmp_path / "recipes/common.toml")
    (tmp_path / "recipes/mine.toml").write_text('base = "common.toml"\n[training]\nsteps = 1\n')
    (folder / "models").mkdir()  # titanlite's models/ has this name too
    (folder / "models/__init__.py").write_text("")
    (folder / "link.sh").symlink_to(ROOT / "run_train.sh")
    words = ["../recipes/mine.toml", "--checkpoint.enable=false"]
    ended = finish(launch(*words, folder=folder, script=folder / "link.sh"))
    assert (ended.code, ended.left) == (0, []), ended.err
    assert [line["step"] for line in reports(folder / "out")] == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "recipes"]
    assert not (folder / "out/checkpoint").exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="on a CPU inductor needs a compiler")
def test_a_compiled_and_checkpointed_run_compiles_once_and_prints_no_library_output(tmp_path):
    words = ["--compile.enable", "true", "--compile.backend", "inductor", "--activation_checkpoint.mode", "selective"]
    words += ["--training.steps", "4", "--validation.enable", "true", "--validation.freq", "2"]
    words += ["--validation.dataset", "data.txt", "--parallelism.tensor_parallel_degree", "2"]
    ended = run("run.toml", *words, folder=working_folder(tmp_path), NGPU="2")
    assert (ended.code, ended.out, ended.left) == (0, "", []), ended.err
    assert [line["recompilations"] for line in reports(tmp_path / "out")] == [0] * 4
    own = re.compile(r"\d\d:\d\d:\d\d [a-z ]+")
    assert [line for line in ended.err.splitlines() if not own.match(line)] == []
    assert "warning" not in ended.err.lower() and "recompiled" not in ended.err


def test_recompilations_since_the_last_report_are_counted_where_a_report_validates_too(tmp_path):
    always = {"metrics": {"log_freq": 3}, "validation": {"enable": True, "freq": 3, "steps": 1, "dataset": "data.txt"}}
    compiled = {"compile": {"enable": True, "backend": "eager"}, "training": {"steps": 6}}
    prepare(tmp_path, "tests.forks.recompiling", "large", **always, **compiled)
    ended = train("run.toml", folder=tmp_path)
    assert ended.code == 0, ended.err
    counts = {line["step"]: line["recompilations"] for line in reports(tmp_path / "out")}
    assert counts == {1: 0, 3: 1, 6: 4}  # step 2 is of the warm-up


# --------------------------------------------------------------------------------------------------- how a run is ended


def test_ctrl_c_ends_all_ranks_with_one_line(tmp_path):
    started = launch("run.toml", "--training.steps", "1000000", folder=working_folder(tmp_path), NGPU="2", **SLOWLY)
    when_training(started, tmp_path / "out")
    assert sorted(started.ranks()) == [0, 1]
    os.killpg(started.process.pid, signal.SIGINT)
    ended = finish(started)
    assert (ended.code, ended.left) == (130, []), ended.err
    assert "stopped by SIGINT" in ended.err and "Traceback" not in ended.err


@pytest.mark.slow  # test_ctrl_c_ends_all_ranks_with_one_line has the exit code
def test_ctrl_c_while_pytorch_is_imported_prints_no_traceback(tmp_path):
    started = launch("run.toml", folder=working_folder(tmp_path))
    until(lambda: started.has_loaded("libtorch"), lambda: started.process.poll() is None)
    os.killpg(started.process.pid, signal.SIGINT)
    ended = finish(started)
    assert (ended.code, ended.left) == (130, []), ended.err
    assert "Traceback" not in ended.err
