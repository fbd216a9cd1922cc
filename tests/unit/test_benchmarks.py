"""Benchmark scripts start, their plans are valid configurations, and a small round of each kind writes its report."""

import json
import runpy
import sys

import pytest

from benchmarks import curves, report, throughput, transfer
from benchmarks.code_size import code_lines
from benchmarks.curves import LAST, REFERENCE, ROOT, RUNS
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.estimates import estimate_gib
from benchmarks.gpu.plan import PARTS, named, options_of, training_runs, words_of
from models import llama3
from titanlite.config.read import read_config
from titanlite.loop.checks import check
from titanlite.registry.family import Family

TINY = "llama3:debug,dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=48"
REPLACES_KERNELS = "AdamW, float16"  # importing its model replaces kernels in the process
SCRIPTS = [path.stem for path in sorted(ROOT.glob("benchmarks/*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{script}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


def test_code_size_counts_lines_with_code():
    assert code_lines('"""One\ntwo."""\n\n# comment\nx = 1  # another\n') == 1
    assert code_lines("def f(\n    a,\n\n    b,\n):\n    return '''a\n        b'''\n") == 6


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_training_run_for_gpus_is_a_valid_configuration(rehearse):
    for name, run in training_runs(PARTS).items():
        config = read_config(ROOT / "train_configs" / f"{run.config}.toml", words_of(options_of(run, rehearse)))
        assert config.model.flavor == "debug" or not rehearse, name


_TRAINED = training_runs(PARTS)
# for each kind of memory, the run that needs the most
_LARGEST = (
    *("8b/4k batch 4", "8b-float32/4k batch 2 full", "documents/8b 4k batch 4", "float8/8k batch 2 tensorwise"),
    *("moe/qwen3 30b-a3b adapters", "moe/gemma 2 9b"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", _LARGEST)
def test_the_largest_training_runs_for_gpus_fit_by_their_estimates(name):
    found = estimate_gib(_TRAINED[name], 1, rehearse=False)
    assert found["fits"], found


@pytest.mark.slow
def test_a_training_run_that_a_gpu_cannot_hold_is_found():
    run = _TRAINED["8b/4k batch 4"]
    found = estimate_gib(run._replace(options=run.options | {"training.local_batch_size": 6}), 1, rehearse=False)
    assert not found["fits"], found


def test_every_loss_curve_is_a_configuration_without_faults_and_the_report_has_its_mean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "train_configs" / "llama_debug.toml"
    for name in RUNS.keys() - {REPLACES_KERNELS}:
        config = read_config(path, [word for key, value in RUNS[name].items() for word in (f"--{key}", value)])
        check(config, str(path), 1)
    result = {"commit": "0123456789abcdef", "curves": {REFERENCE: [9.0] + [2.0] * LAST, "other": [9.0] + [2.5] * LAST}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "curves.json").write_text(json.dumps(result))
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\n")
    assert report.main(["--folder", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert curves.table(result["curves"]) in page and "| other | 2.5000 | +0.5000 |" in page
    assert page.startswith("before\n") and "old" not in page


@pytest.mark.slow
def test_throughput_measures_contestants_with_equal_losses_and_refuses_others(tmp_path):
    output = tmp_path / "results" / "throughput_a.json"
    words = ["--device", "cpu", "--peers", "plain", "--model", TINY, "--vocab", "100", "--batch", "2", "--seq", "16"]
    words += ["--accumulate", "2", "--variant", "split=--ranks 2"]
    words += ["--precision", "float32", "--threads", "1", "--rounds", "2", "--steps", "2", "--no-warm", "--check-steps", "3"]
    words += ["--titanlite", "--compile.enable false", "--variant", "hasty=--optimizer.lr 0.05", "--output", str(output)]
    assert throughput.main(words) == 1  # one contestant is refused
    result = json.loads(output.read_text())
    assert set(result["failed"]) == {"titanlite:hasty"} and "plain's are" in result["failed"]["titanlite:hasty"]
    ours, plain = result["contestants"]["titanlite"], result["contestants"]["plain"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert result["contestants"]["titanlite:split"]["losses"] == pytest.approx(ours["losses"], rel=1e-6)
    model = Family(llama3, throughput.dimensions(TINY, 100)).on_meta()
    assert result["job"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    assert report.main(["--folder", str(tmp_path)]) == 0
    assert "| plain | " in (tmp_path / "README.md").read_text()


def test_transfer_trains_with_and_without_mup_and_counts_grid_steps():
    data = transfer.text()
    standard, mup = (transfer.final_loss(32, 2.0**-4, scaled, data, steps=3) for scaled in (False, True))
    assert 0 < standard < 10 and 0 < mup < 10 and abs(standard - mup) > 1e-3
    losses = [[9.0] * place + [1.0] + [9.0] * (len(transfer.EXPONENTS) - place - 1) for place in (5, 3)]
    assert transfer.moved({"32": losses[0], "64": losses[1]}) == 2


@pytest.mark.slow
def test_a_rehearsal_does_a_run_of_each_kind_and_writes_its_page(tmp_path):
    """The whole rehearsal takes five minutes on two cores; these parts have every kind of run."""
    parts = ["start", "operations", "costs", "documents", "memory", "peers"]
    words = ["--rehearse", "--parts", ",".join(parts), "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    assert gpu.main(words) == 0
    found = gpu.load_results(tmp_path / "results")
    statuses = {f"{part}/{name}": result["status"] for part, each in found.items() for name, result in each.items()}
    assert statuses == dict.fromkeys((name for name in named(PARTS, ["*"]) if name.partition("/")[0] in parts), "done")
    assert "| within 3% |" in (tmp_path / "results" / "README.md").read_text()
    assert set(found["memory"]["estimates"]["figures"]) == set(training_runs(PARTS))
