"""Training from Python: `titanlite.run` starts the same run as the command line, and `titanlite.Run` reads its results."""

import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

import models.llama3
import titanlite
from models.attention import SeqInfo
from tests.end_to_end.launcher import MARK, ROOT, processes
from tests.waiting import until
from titanlite import api
from titanlite.config.read import read_config
from titanlite.data.sources import open_tokenizer
from titanlite.inference.generate import Sampling
from titanlite.registry import family
from titanlite.registry import source as model_source

NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"
TABLES = {
    "model": {"overrides": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}},
    "training": {
        "sources": [{"path": "data.txt", "weight": 2.0}],
        **{"steps": 3, "seq_len": 32, "local_batch_size": 2, "global_batch_size": 4},
    },
    "lr_scheduler": {"warmup_steps": 0, "total_steps": 5},
    "metrics": {"log_freq": 1},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data.txt").write_text("".join(f"Line {i} of the data says {i * i}.\n" for i in range(400)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_a_run_from_tables_resumes_on_other_ranks_with_a_file_and_its_results_are_read(folder, capfd, monkeypatch):
    run = titanlite.run(TABLES, checkpoint={"enable": True}, job={"dump_folder": "out"})
    assert run.folder == Path("out") and "step 3/3" in capfd.readouterr().out
    (folder / "run.toml").write_text('job.dump_folder = "out"\ncheckpoint.enable = true\n')
    run = titanlite.run("run.toml", ranks=2, **{**TABLES, "training": TABLES["training"] | {"steps": 5}})
    commands = [start["command"][1] for start in json.loads((folder / "out" / "provenance.json").read_text())]
    assert commands == ["out/config.toml", "run.toml"]  # the file of the tables is gone
    (source,) = run.config().training.sources
    assert (source.path, source.weight, run.config().model.overrides) == ("data.txt", 2.0, TABLES["model"]["overrides"])
    assert run.metrics()["step"] == [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics()["loss"] == [line["loss"] for line in lines]
    assert "startup_seconds" in run.metrics() and {len(column) for column in run.metrics().values()} == {5}
    assert run.config().training.steps == 5 and [path.name for path in run.checkpoints()] == ["step-00000003", "step-00000005"]

    (text,) = run.generate("Line 7", max_new_tokens=1, sampling=Sampling(temperature=0))
    earlier, model = run.model(str(run.checkpoints()[0])), run.model()
    assert not torch.equal(earlier.embed.weight, model.embed.weight)
    with torch.no_grad():  # greedy, by hand
        tokenizer = open_tokenizer("")
        ids = tokenizer.begun(tokenizer.encode("Line 7"))
        tokens = torch.tensor([ids])
        likeliest = int(model.head(model(tokens, SeqInfo(torch.arange(len(ids))[None])))[0, -1].argmax())
    assert text == tokenizer.decode([*ids, likeliest], skip_special_tokens=False)

    # messages name arguments of Python
    with pytest.raises(ValueError, match=r"no tokenizer\.json in it; .* in Python assets="):
        run.generate("Line 7", assets=folder)
    monkeypatch.setattr(family, "family_names", lambda: [])
    with pytest.raises(ValueError, match=r"if you trust it, .* in Python name='llama3'"):
        run.model()
    assert torch.equal(run.model(name="llama3").embed.weight, model.embed.weight)
    edited = {name: each | {"hash": ""} for name, each in model_source.source_of(models.llama3).items()}
    monkeypatch.setattr(model_source, "source_of", lambda module: edited)
    with pytest.raises(ValueError, match=r"models/__init__\.py: was edited after .* restart"):
        run.generate("Line 7", name="llama3")


def test_a_fault_is_an_exception_that_names_the_key_and_nothing_is_started(folder):
    with pytest.raises(ValueError, match=r"training\.stepz.*did you mean training\.steps"):
        titanlite.run(TABLES, training={"stepz": 4}, job={"dump_folder": "out"})
    with pytest.raises(ValueError, match=r"parallelism\.tensor_parallel_degree"):  # found by the launcher's check
        titanlite.run(TABLES, parallelism={"tensor_parallel_degree": 3}, job={"dump_folder": "out"})
    assert not (folder / "out").exists()
    with pytest.raises(ValueError, match="out: no such folder"):
        titanlite.Run("out")


def test_an_interrupt_ends_all_ranks(folder, monkeypatch):
    monkeypatch.setenv(MARK, folder.name)

    def interrupted(text="", **words):
        if re.match(r".* step +\d+/", text):
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        titanlite.run(
            TABLES, ranks=2, job={"dump_folder": "out"}, training={"steps": 100_000}, lr_scheduler={"total_steps": 100_000}
        )
    until(lambda: processes(folder.name) == [])


@pytest.mark.slow
def test_a_run_whose_script_is_killed_saves_and_stops(folder):
    endless = {"training": TABLES["training"] | {"steps": 100_000}, "lr_scheduler": {"total_steps": 100_000}}
    sections = {**TABLES, **endless, "job": {"dump_folder": "out"}, "checkpoint": {"enable": True}}
    environment = os.environ | {MARK: folder.name, "PYTHONPATH": str(ROOT)}
    script = subprocess.Popen([sys.executable, "-c", f"import titanlite; titanlite.run({sections})"], env=environment)
    metrics = folder / "out/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), lambda: script.poll() is None)
    script.kill()
    script.wait()
    until(lambda: processes(folder.name) == [])
    assert len(list((folder / "out/checkpoint").glob("step-*"))) == 1


def test_values_of_python_become_those_of_the_schema_and_each_gpu_has_a_rank(folder, monkeypatch):
    started = []

    def follow(command, environment):
        started.append((read_config(command[1], command[2:]), environment["NGPU"]))

    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(api, "_follow", follow)
    (folder / "run.toml").write_text('training.dataset_path = "other.txt"\n')
    lr, steps, source = np.float64(1e-3), np.int64(5), {"path": folder / "data.txt", "weight": None}
    training = {"sources": (source,), "dataset_path": None, "add_bos": None, "steps": steps}
    titanlite.run("run.toml", training=training, optimizer={"lr": lr}, job={"dump_folder": folder})
    titanlite.run({"training": {"steps": steps, "add_bos": None}, "job": {"dump_folder": folder}, "optimizer": {"lr": lr}})
    assert [(config.training.steps, config.optimizer.lr, ranks) for config, ranks in started] == [(5, 1e-3, "3")] * 2
    first = started[0][0].training
    assert (first.dataset_path, first.sources[0].path) == ("", str(folder / "data.txt"))


def test_none_is_a_dimension_in_overrides_and_an_option_that_is_not_given_elsewhere(folder, monkeypatch):
    """A loss with `cap=None` had got the word "none"."""
    started = []
    monkeypatch.setattr(api, "_follow", lambda command, _: started.append(read_config(command[1], command[2:])))
    tables = {
        "model": {"overrides": {"rope_scaling": None}},
        "training": {"loss": "own.loss:capped", "loss_options": {"cap": None, "power": 2}},
    }
    titanlite.run(tables | {"job": {"dump_folder": folder}})
    titanlite.run({}, job={"dump_folder": folder}, **tables)
    found = [(config.model.overrides, config.training.loss_options) for config in started]
    assert found == [({"rope_scaling": "none"}, {"power": 2})] * 2


def test_an_entry_that_is_no_table_is_a_line_as_in_a_file(folder, monkeypatch):
    """`base` ended in an AttributeError, and so did keys outside of tables."""
    started = []
    monkeypatch.setattr(api, "_follow", lambda command, _: started.append(read_config(command[1], command[2:])))
    (folder / "below.toml").write_text("training.seq_len = 64\n")
    job: dict[str, Any] = {"job": {"dump_folder": folder}}
    for base in ("below.toml", Path("below.toml")):
        titanlite.run({"base": base, "training.steps": 5, "optimizer": None, **job})
        titanlite.run({"base": base, **job}, **{"training.steps": 5})
    assert [(each.training.seq_len, each.training.steps) for each in started] == [(64, 5)] * 4
    for tables, fault in (({"training": 5}, "training = 5"), ({"steps": 5}, "steps = 5"), ({"base": 5}, "base = 5")):
        with pytest.raises(ValueError, match=fault):
            titanlite.run({**tables, **job})
    with pytest.raises(ValueError, match='training = "5"'):
        titanlite.run({}, training=5, **job)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    done = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in done.cells for output in cell.get("outputs", []))
