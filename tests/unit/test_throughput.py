"""benchmarks.throughput: what it makes of raw numbers, that all do the same work, and that it refuses who does not."""

import json
import math

import pytest
import torch

from benchmarks import report, throughput
from benchmarks.contestants.job import Job, interleaved
from benchmarks.figures import aligned, disagreements, figures, markdown, table
from benchmarks.throughput import dimensions, write_config
from models import llama3
from models.attention import SeqInfo
from models.blocks import apply_rope
from models.rope import rotation
from titanlite.registry.family import Family
from titanlite.transforms.initialize import initialize

TINY = "llama3:debug,dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=48"


def _raw(seconds: list[float], peak: int, warm: tuple[float, ...] = (5.0, 7.0, 6.0), recomputed: float | None = 0.0) -> dict:
    memory = {"import": {"resident": 100}, "build": {"resident": 400}, "peak": {"resident": 10, "peak_resident": peak}}
    starts = {"cold": 9.0, "warm": list(warm)}
    known = {"keys": {}, "versions": {"torch": "2"}, "losses": [1.0], "recomputed": recomputed}
    return {"seconds": seconds, "memory": memory, "first_step": starts, **known}


RESULT = {
    "date": "2026-11-21T20:00:00+00:00",
    "command": "python -m benchmarks.throughput",
    "commit": "0123456789abcdef",
    "changed": False,
    "hardware": {"cpu": "a CPU", "cores": 2, "memory_gb": 8.0},
    "environment": {"allocator": "keep", "variables": {"MALLOC_TOP_PAD_": "1"}},
    "job": {
        "device": "cpu", "precision": "bfloat16", "batch": 2, "seq": 50, "accumulate": 1, "threads": 2, "recompute": "none",
        "parameters": 20, "model": {"dim": 2, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": 4, "vocab_size": 5},
    },
    "one_at_a_time": False,
    "rounds": 3,
    "steps": 4,
    "flops": {"causal": 30.0, "palm": 40.0, "blocks_forward": 6.0},
    "datasheet_flops": None,
    "matmul": {"flops": 600.0, "seconds": [1.0, 3.0, 2.0]},
    "contestants": {
        "titanlite": _raw([1.0, 2.0, 4.0], 1000),
        "peer": _raw([2.0, 3.0, 4.0], 2000, warm=(), recomputed=1.0),
        "odd": _raw([4.0, 4.0, 4.0], 700, recomputed=None),
    },
    "left_out": {"hf": "not installed: accelerate"},
    "failed": {},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ arithmetic


def test_speeds_are_medians_and_ratios_medians_of_the_ratio_inside_a_round():
    found = figures(RESULT)
    assert found["titanlite"].tokens_per_second == 400 / 2
    assert found["peer"].tokens_per_second == 400 / 3
    assert found["peer"].to_ours == 2 / 3  # of 1/2, 2/3, 4/4; the ratio of the medians would be the same by chance
    assert found["odd"].to_ours == 0.5  # of 1/4, 2/4, 4/4
    assert found["titanlite"].to_ours == 1.0


def test_the_table_has_the_fastest_first_and_dashes_for_what_was_not_measured():
    rows = table(RESULT)
    assert [row[0] for row in rows[1:]] == ["titanlite", "peer", "odd"]
    peer = dict(zip(rows[0], rows[2], strict=True))
    assert (peer["tokens/s"], peer["of titanlite's"], peer["titanlite is"]) == ("133", "0.667", "1.50 x")
    assert (peer["first step cold s"], peer["warm s"]) == ("9.0", "-")
    assert dict(zip(rows[0], rows[3], strict=True))["HFU / matmul"] == "-"
    assert "MFU PaLM" not in rows[0] and "MFU PaLM" in table(RESULT | {"datasheet_flops": 1e4})[0]
    assert len(markdown(rows).splitlines()) == 5
    assert len({len(line) for line in aligned(rows).splitlines()}) == 1


# -------------------------------------------------------------------------------------------------------------- agreement


def test_losses_that_are_apart_are_refused_with_their_figures_and_so_is_what_is_no_number():
    losses = {
        "titanlite": [5.0, 4.0],
        "plain": [5.0, 4.0001],
        "wrong": [5.0, 4.1],
        "broken": [5.0, math.nan],
        "endless": [math.inf, 4.0],
    }
    reference, found = disagreements(losses, 1e-3)
    assert reference == "plain" and set(found) == {"wrong", "broken", "endless"}
    assert "4.100000" in found["wrong"] and "4.000100" in found["wrong"] and "0.001" in found["wrong"]


# -------------------------------------------------------------------------------------------------------------- same work


def _job(folder, config: llama3.Config, **keys) -> Job:
    write_config(folder, config, torch.float32)
    return Job(module="plain", folder=str(folder), **keys)


def test_the_weights_are_those_that_titanlite_initializes_and_no_file_holds_them(tmp_path):
    for number, config in enumerate([dimensions(TINY, 70), dimensions("llama3:1b,dim=32,n_layers=1,ffn_dim=8", 50)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = _job(folder, config, seed=3)
        assert job.model == config
        family = Family(llama3, config)
        model = family.on_meta()
        initialize(model, family, 3, torch.device("cpu"))
        expected, written = dict(model.named_parameters()), dict(job.weights())
        assert len(written) == len(expected)
        assert [file.name for file in folder.iterdir()] == ["config.json"]
        for name, parameter in expected.items():
            place = name.split(".")[1]
            theirs = llama3.HF[name.replace(f".{place}.", ".{i}.") if place.isdecimal() else name].replace("{i}", place)
            torch.testing.assert_close(written[theirs], parameter.detach(), rtol=0, atol=0)


def test_interleaved_rows_rotate_neighbours_to_the_same_scores():
    heads, size, dim, seq = 2, 8, 6, 5
    generator = torch.Generator().manual_seed(0)
    wq, wk = (torch.randn(heads * size, dim, generator=generator) for _ in range(2))
    x = torch.randn(1, seq, dim, generator=generator)
    tables = rotation(SeqInfo(torch.arange(seq)[None]), size, 100.0)
    q, k = (apply_rope((x @ w.T).unflatten(-1, (heads, size)), *tables) for w in (wq, wk))

    frequencies = 100.0 ** -(torch.arange(0, size, 2) / size)
    turns = torch.polar(torch.ones(seq, size // 2), torch.arange(seq)[:, None] * frequencies)[None, :, None]

    def neighbours(w: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex((x @ interleaved(w, heads).T).unflatten(-1, (heads, size // 2, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    torch.testing.assert_close(torch.einsum("bqhd,bkhd->bhqk", neighbours(wq), neighbours(wk)), scores)


# --------------------------------------------------------------------------------------------------------------- a report


def test_the_report_replaces_what_is_between_its_marks_and_nothing_else(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "throughput_a.json").write_text(json.dumps(RESULT))
    (tmp_path / "results" / "another.json").write_text("{}")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nfrom an earlier run\n{report.END}\nafter\n")
    assert report.main(["--folder", str(tmp_path)]) == 0
    once = readme.read_text()
    assert once.startswith("before\n") and once.endswith("after\n") and "earlier" not in once
    assert "| peer | 133 | 0.667 | 1.50 x |" in once and "hf: not installed: accelerate" in once and "MALLOC_TOP_PAD_=1" in once
    assert (tmp_path / "results" / "throughput_a.png").stat().st_size > 1000
    assert report.main(["--folder", str(tmp_path)]) == 0 and readme.read_text() == once


# -------------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.slow
def test_a_run_measures_who_does_the_same_work_and_refuses_who_does_not(tmp_path, capsys):
    output = tmp_path / "out" / "result.json"
    words = ["--device", "cpu", "--peers", "plain", "--model", TINY, "--vocab", "100", "--batch", "2", "--seq", "16"]
    words += ["--accumulate", "2", "--variant", "split=--ranks 2"]
    words += ["--precision", "float32", "--threads", "1", "--rounds", "2", "--steps", "2", "--no-warm", "--check-steps", "3"]
    words += ["--titanlite", "--compile.enable false", "--variant", "hasty=--optimizer.lr 0.05", "--output", str(output)]
    assert throughput.main(words) == 1  # since one is refused
    result = json.loads(output.read_text())
    assert set(result["contestants"]) == {"titanlite", "plain", "titanlite:split"}
    assert set(result["failed"]) == {"titanlite:hasty"} and "plain's are" in result["failed"]["titanlite:hasty"]
    ours, plain = result["contestants"]["titanlite"], result["contestants"]["plain"]
    assert len(ours["losses"]) == 3 and ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    split = result["contestants"]["titanlite:split"]
    assert split["ranks"] == 2 and split["losses"] == pytest.approx(ours["losses"], rel=1e-6)
    assert len(ours["seconds"]) == len(plain["seconds"]) == len(result["matmul"]["seconds"]) == 2
    for raw in (ours, plain):
        memory = raw["memory"]
        assert 0 < memory["import"]["resident"] < memory["peak"]["peak_resident"]
        assert raw["first_step"]["cold"] > 0 and raw["first_step"]["warm"] == []
    assert result["job"]["parameters"] == sum(p.numel() for p in Family(llama3, dimensions(TINY, 100)).on_meta().parameters())
    printed = capsys.readouterr()
    assert "titanlite:hasty: refused: losses" in printed.err and "not measured: titanlite:hasty" in printed.out
    assert report.title(result).startswith("1 CPU thread:")
