"""benchmarks.throughput: what it makes of raw numbers, that all do the same work, and that it refuses who does not."""

import copy
import dataclasses
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import report, throughput
from benchmarks.allocators import ALLOCATORS, environment
from benchmarks.contestants import CONTESTANTS
from benchmarks.contestants.job import Job, interleaved
from benchmarks.contestants.titanlite import recomputed
from benchmarks.figures import aligned, disagreements, figures, least_bytes, markdown, state_bytes, table
from benchmarks.processes import Left, Process, base_environment
from benchmarks.throughput import Fault, Session, dimensions, line_up, parse, training_flops, write_config
from models import llama3
from models.attention import SeqInfo
from models.blocks import apply_rope
from models.rope import rotation
from titanlite.transforms.initialize import initialize
from titanlite.transforms.registry import Family

DEBUG = llama3.FLAVORS["debug"]
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


def test_utilisation_is_of_the_data_sheet_and_of_the_matrix_product_of_the_same_run():
    product = 600 * 4 / 2.0
    on_cpu = figures(RESULT)
    assert (on_cpu["titanlite"].mfu_causal, on_cpu["titanlite"].hfu) == (None, None)
    assert on_cpu["titanlite"].matmul_causal == 200 * 30 / product
    assert on_cpu["titanlite"].matmul_palm == 200 * 40 / product
    sheet = figures(RESULT | {"datasheet_flops": 1e4})
    assert sheet["titanlite"].mfu_causal == 200 * 30 / 1e4
    assert sheet["titanlite"].mfu_palm == 200 * 40 / 1e4


def test_hardware_utilisation_counts_what_is_recomputed_and_is_not_told_where_that_is_unknown():
    found = figures(RESULT)
    assert found["titanlite"].matmul_hfu == found["titanlite"].matmul_causal
    assert found["peer"].matmul_hfu == pytest.approx(found["peer"].matmul_causal * 36 / 30)
    assert found["odd"].matmul_hfu is None and found["odd"].matmul_causal is not None


def test_memory_is_told_whole_above_the_state_and_without_the_libraries():
    assert (state_bytes(20, "bfloat16"), state_bytes(20, "bfloat16-pure")) == (320, 160)
    ours = figures(RESULT)["titanlite"]
    assert (ours.peak, ours.above_state, ours.net) == (1000, 680, 580)
    on_gpu = copy.deepcopy(RESULT)
    on_gpu["job"]["device"] = "cuda"
    for raw in on_gpu["contestants"].values():
        raw["memory"]["peak"] |= {"allocated": 3, "peak_allocated": 5000}
        raw["memory"]["import"]["allocated"] = 0
    ours = figures(on_gpu)["titanlite"]
    assert (ours.peak, ours.above_state, ours.net) == (5000, 4680, 4680)


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


def test_flops_of_recomputation_are_the_forward_pass_of_the_blocks():
    config = llama3.FLAVORS["debug"]
    found = training_flops(config, 256)
    matrices = 4 * (256 * 32 * (2 * 8 + 2 * 4) + 3 * 256 * 768)
    attention = 4 * 2 * 2 * 256 * 257 / 2  # a layer: scores and mixture, 2 FLOPs each, over the (seq + 1) / 2 tokens seen
    assert found["blocks_forward"] == pytest.approx(2 * matrices + attention)


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


def test_without_the_plain_loop_the_first_is_the_reference():
    assert disagreements({"titanlite": [1.0], "hf": [1.0]}, 0.0) == ("titanlite", {})


# -------------------------------------------------------------------------------------------------------------- same work


def _job(folder, config: llama3.Config, **keys) -> Job:
    write_config(folder, config, torch.float32)
    return Job(module="plain", folder=str(folder), **keys)


def test_the_weights_are_those_that_titanlite_initialises_and_no_file_holds_them(tmp_path):
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


def test_every_step_has_its_own_batch_the_same_for_everybody(tmp_path):
    job = _job(tmp_path, dimensions(TINY, 100), batch=3, seq=40, accumulate=2)
    first = job.tokens(0)
    assert first.shape == (2, 3, 41) and first.dtype == torch.int64
    assert first.equal(job.tokens(0)) and not first.equal(job.tokens(1))
    many = torch.cat([job.tokens(step).flatten() for step in range(40)])
    assert many.min() == 0 and many.max() < 100
    # about as often as 1 / (token + 1) says: there is something to learn
    assert (many == 0).float().mean() == pytest.approx(math.log(2) / math.log(100), rel=0.1)


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


# ----------------------------------------------------------------------------------------------------------- command line


def test_dimensions_differ_from_a_flavour_by_what_is_given():
    assert dimensions("llama3:debug", None) == llama3.FLAVORS["debug"]
    changed = dimensions("llama3:debug,dim=512,n_layers=8", 2048)
    assert (changed.dim, changed.n_layers, changed.vocab_size, changed.ffn_dim) == (512, 8, 2048, 768)


@pytest.mark.parametrize("model", ["llama3", "llama3:9b", "qwen3:debug", "llama3:debug,width=3", "llama3:debug,dim=wide"])
def test_a_model_that_is_none_is_refused_with_what_there_is(model):
    with pytest.raises(Fault, match="--model"):
        dimensions(model, None)


def test_peers_that_are_unknown_are_refused_and_missing_ones_left_out(monkeypatch):
    with pytest.raises(Fault, match="--peers plian: there are"):
        line_up(parse(["--peers", "plain,plian"]), DEBUG)
    monkeypatch.setattr(throughput, "missing_packages", lambda _, packages: [name for name in packages if name == "accelerate"])
    found, left_out = line_up(parse(["--peers", "plain,hf"]), DEBUG)
    assert list(found) == ["titanlite", "plain"] and left_out == {"hf": "not installed: accelerate"}


@pytest.mark.parametrize(
    ("precision", "fit"),
    [("bfloat16", ["titanlite"]), ("bfloat16-pure", ["titanlite", "plain", "plain-compiled", "hf"])],
)
def test_peers_that_a_gpu_cannot_hold_are_left_out_unless_they_are_named(monkeypatch, precision, fit):
    monkeypatch.setattr(throughput, "missing_packages", lambda _, packages: set(packages) & {"torchtitan", "lightning"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * 2**30))  # an H200
    words = ["--device", "cuda", "--precision", precision, "--batch", "4", "--seq", "4096", "--recompute", "full"]
    found, left_out = line_up(parse(words), llama3.FLAVORS["8b"])
    assert list(found) == fit
    if "plain" not in fit:
        assert re.fullmatch(r"needs 1\d\d GB or more, of 151; --peers plain tries it", left_out["plain"])
    assert "plain" in line_up(parse([*words, "--peers", "plain"]), llama3.FLAVORS["8b"])[0]


def test_the_bytes_that_a_peer_needs_at_least_are_below_those_that_it_took():
    result = json.loads((report._HERE / "results" / "throughput_cpu_128256_bfloat16.json").read_text(encoding="utf-8"))
    config = dimensions("llama3:debug", 128256)
    for name, found in figures(result).items():
        if name != "titanlite":
            least = least_bytes(config, "bfloat16", 8 * 256, False, CONTESTANTS[name].float32_logits)
            assert 0.4 * found.net < least - state_bytes(result["job"]["parameters"], "bfloat16") < found.above_state


def test_variants_add_their_options_and_ranks_to_those_of_titanlite():
    words = ["--peers", "plain", "--titanlite", "--optimizer.eps 1e-9", "--variant", "two=--ranks 2 --compile.enable false"]
    found, _ = line_up(parse(words), DEBUG)
    assert found["titanlite"][0].keys == {"options": ["--optimizer.eps", "1e-9"]} and found["titanlite"][1] == 1
    variant, ranks = found["titanlite:two"]
    assert ranks == 2 and variant.keys == {"options": ["--optimizer.eps", "1e-9", "--compile.enable", "false"]}


def test_every_run_has_the_same_environment_but_for_what_is_asked(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("LANG", "C")
    found = base_environment(environment("keep"), {"MALLOC_TOP_PAD_": "7"})
    assert not found.keys() & {"MALLOC_ARENA_MAX", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_FREEZING"} and found["LANG"] == "C"
    assert found["MALLOC_TOP_PAD_"] == "7" and found.items() >= (ALLOCATORS["keep"] | {"MALLOC_TOP_PAD_": "7"}).items()


def test_the_recorded_command_has_no_paths_of_the_machine():
    words = ["--vocab", "5", "--output", "/a/x.json", "--python", "litgpt=/b/python", "--python=hf=/c/python", "--rounds", "3"]
    assert throughput.command(words).endswith("throughput --vocab 5 --python litgpt=python --python=hf=python --rounds 3")


def test_every_contestant_has_its_file():
    for name, contestant in CONTESTANTS.items():
        assert (throughput.ROOT / "benchmarks" / "contestants" / f"{contestant.module}.py").is_file(), name


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


def test_a_readme_without_marks_is_left_alone(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    assert report.main(["--folder", str(tmp_path)]) == 1
    assert readme.read_text() == "mine" and report.BEGIN in capsys.readouterr().err


def test_a_wrong_option_of_titanlite_is_told_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr(throughput, "Process", None)
    tiny = ["--device", "cpu", "--peers", "plain", "--model", TINY, "--vocab", "100"]
    assert throughput.main([*tiny, "--variant", "x=--compile.enabel true"]) == 1
    assert "did you mean compile.enable?" in capsys.readouterr().err


def test_the_share_of_blocks_that_titanlite_computes_again_follows_its_options(tmp_path):
    job = _job(tmp_path, dimensions(f"{TINY},n_layers=5", 100))
    words = "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option"
    shares = {"": 0.0, f"{words} 2": 2 / 5, f"{words} op": None}
    for options, share in shares.items():
        assert recomputed(dataclasses.replace(job, keys={"options": options.split()})) == share
    assert recomputed(dataclasses.replace(job, recompute="full")) == 1.0


def test_a_process_that_fails_says_why_and_is_gone(tmp_path):
    job = dataclasses.replace(_job(tmp_path, dimensions(TINY, 100), batch=2, seq=16), module="nobody")
    with pytest.raises(Left, match=r"No module named 'benchmarks\.contestants\.nobody'") as caught:
        Process(job, sys.executable, base_environment({}, {}), tmp_path)
    assert caught.value.failed


def test_an_allocator_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setattr("benchmarks.allocators.glob.glob", lambda _: [])
    with pytest.raises(FileNotFoundError, match="--allocator tcmalloc"):
        environment("tcmalloc")


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


@pytest.mark.parametrize("whole", [0, 2])
def test_an_interrupted_run_is_that_of_its_whole_rounds(whole):
    def turn(number: int) -> None:
        session.products.append(1.0)
        if number == whole:
            raise KeyboardInterrupt
        session.found["titanlite"]["seconds"].append(2.0)

    session = SimpleNamespace(args=parse(["--rounds", "5"]), products=[], found={"titanlite": {"seconds": []}}, round=turn)
    if whole:
        assert Session.take_turns(session) == whole
        assert len(session.products) == len(session.found["titanlite"]["seconds"]) == whole
    else:
        with pytest.raises(KeyboardInterrupt):
            Session.take_turns(session)


def test_the_allocators_that_the_launcher_sets_are_keep_on_a_cpu_and_the_default_on_a_gpu(monkeypatch):
    text = (report._HERE.parent / "run_train.sh").read_text(encoding="utf-8")
    assert dict(re.findall(r"export (MALLOC_\w+)=\$\{\w+:-(\d+)\}", text)) == ALLOCATORS["keep"]
    assert dict(re.findall(r"export (PYTORCH_ALLOC_CONF)=\$\{\w+:-(\S+)\}", text)) == ALLOCATORS["expandable"]
    assert parse(["--device", "cpu"]).allocator == "default"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse(["--device", "cuda"]).allocator == "expandable"
