"""The search ranks planted bad meshes below good ones, and the error that `plan` prints is that of the published runs."""

import contextlib
import functools
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_score import by_device, score, shape_of
from benchmarks.published import FILE, Dimensions, Run
from titanlite.config.read import Faults, read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.parallel import expert, mesh
from titanlite.plan.job import ERRORS, MEMORY_ERROR, choice_of, job_of
from titanlite.plan.pipeline import orders, rehearse, stage_costs
from titanlite.plan.report import RESERVE
from titanlite.plan.search import NODE_SIZE, Candidate, candidates, choices, keys_of
from titanlite.plan.shape import ExpertShape, Shape
from titanlite.plan.step import simulated_ranks
from titanlite.plan.time import LINK, Choice, Job, all_to_all, forward, memory, parameters_of_rank, step
from titanlite.plan.timeline import events
from titanlite.registry.family import family_of
from titanlite.tools import plan as tool
from titanlite.tools.plan import read_job
from titanlite.transforms.meta import on_meta

ROOT = Path(__file__).parents[2]
GOOD = Choice(dp_shard=32, tp=8, microbatch=16, recompute="full")


@functools.cache
def job(recipe="llama_70b", *words, device="h100") -> Job:
    return read_job(read_config(f"train_configs/{recipe}.toml", list(words)), device, 8)


JOB = job()


OF_8B, OF_EXPERTS = job("llama_8b"), job("qwen3_30b_a3b")
ALL_SHARDS = Choice(dp_shard=8, microbatch=2, recompute="selective")
IN_A_NODE = Choice(dp_replicate=8, dp_shard=8, recompute="selective")
STAGES = Choice(pp=4, dp_shard=8, tp=8, microbatch=2, recompute="full")
EXPERTS = Choice(dp_shard=32, ep=8, microbatch=2, recompute="full")


def slow_network(of: Job) -> Job:
    return of._replace(device=of.device.model_copy(update={"network_gb_per_second": 1.0}))


# what is wrong: (job, the good mesh, what the bad one has instead)
FAULTS = {
    "tp over nodes": (JOB, GOOD, {"dp_shard": 16, "tp": 16}),
    "microbatch too small": (JOB, GOOD, {"microbatch": 1}),
    "a pipeline of 32 stages": (JOB, GOOD, {"dp_shard": 1, "pp": 32}),
    "a pipeline with few microbatches": (JOB, STAGES, {"microbatch": 16}),
    "a pipeline without need": (OF_8B, ALL_SHARDS, {"dp_shard": 1, "pp": 8}),
    "no overlap over a slow network": (slow_network(OF_8B), IN_A_NODE, {"dp_replicate": 1, "dp_shard": 64}),
    "recomputation without need": (OF_8B, ALL_SHARDS, {"recompute": "full"}),
    "cp without need": (OF_8B, ALL_SHARDS, {"dp_shard": 1, "cp": 8}),
    "tp without need": (OF_8B, ALL_SHARDS, {"dp_shard": 1, "tp": 8}),
    "ep over nodes": (OF_EXPERTS, EXPERTS, {"ep": 32}),
    "each token to each rank of a slow network": (
        slow_network(OF_EXPERTS),
        EXPERTS._replace(ep=32, ep_node=8),
        {"ep_node": 1},
    ),
    "gathered twice over a slow network": (
        slow_network(OF_8B),
        ALL_SHARDS._replace(dp_shard=64, microbatch=1, reshard=False),
        {"reshard": True},
    ),
    "replicas that do not fit": (OF_8B, ALL_SHARDS, {"dp_shard": 1, "dp_replicate": 8}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_mesh_is_ranked_below_the_good_one(name):
    of, good, changes = FAULTS[name]
    room = of.device.memory_gib * 2**30 - RESERVE
    bad = good._replace(**changes)
    assert bad.ranks == good.ranks and memory(of, good) < room
    assert memory(of, bad) > room or step(of, bad).total > 1.03 * step(of, good).total


def test_where_collectives_run_once_a_step_more_microbatches_wait_for_none():
    one, four = (OF_8B._replace(once=True, global_batch=16 * microbatches) for microbatches in (1, 4))
    assert step(one, ALL_SHARDS).fsdp == step(four, ALL_SHARDS).fsdp < step(four._replace(once=False), ALL_SHARDS).fsdp


@pytest.mark.parametrize(
    ("recipe", "words", "each"),
    [("llama_8b", "", 0.0), ("llama_8b", "--training.mixed_precision_reduce bfloat16", 1.0), ("llama_1b", "", 0.21)],
)
def test_narrow_gradients_and_a_tied_embedding_are_all_reduced_with_each_microbatch(recipe, words, each):
    """each: what replicas reduce with a microbatch that is not the last, of all gradients; 0.21 of the 1B are its embedding."""
    of = slow_network(job(recipe, *words.split()))  # which nothing hides

    def waits(microbatches: int) -> float:
        meshes = (Choice(dp_replicate=number, dp_shard=8) for number in (1, 8))
        alone, both = (step(of._replace(global_batch=each.replicas * microbatches), each).fsdp for each in meshes)
        return both - alone

    assert waits(3) / waits(1) == pytest.approx(1 + 2 * each, rel=0.02)


def test_a_token_goes_once_to_a_rank_or_first_to_a_node_that_has_several_of_its_experts():
    """Counted over all choices of 2 of 8 experts, on 4 ranks, of which 2 are a node."""
    of_ranks, of_nodes = (
        sum(len({expert // size for expert in each}) for each in itertools.combinations(range(8), 2)) / 28 for size in (2, 4)
    )
    layer = next(layer for layer, _ in OF_EXPERTS.shape.layers if layer.experts)
    few = layer._replace(experts=ExpertShape(8, 2, 768))
    mesh = Choice(dp_shard=4, ep=4)
    size = 2 * OF_EXPERTS.seq_len * OF_EXPERTS.shape.dim  # of the hidden states of all tokens
    assert forward(OF_EXPERTS, few, mesh).ep == pytest.approx(2 * all_to_all(OF_EXPERTS, 4, size * of_ranks))
    job = OF_EXPERTS._replace(node=2)
    between, within = all_to_all(job, 2, size * of_nodes, stride=2), all_to_all(job, 2, size * of_ranks)
    assert between > within and forward(job, few, mesh._replace(ep_node=2)).ep == pytest.approx(2 * (between + within))


def test_gradients_of_experts_that_no_rank_splits_are_summed_over_tensor_parallelism():
    """1,729 GiB in 32 microbatches, by titanlite estimate for Qwen 3 30B on dp_shard 8 x tp 2; with ep, experts are split."""
    whole = Choice(dp_shard=8, tp=2, microbatch=4, recompute="full")
    without_latency = OF_EXPERTS._replace(device=OF_EXPERTS.device.model_copy(update={"hop_microseconds": 1e-9}))
    seconds = step(without_latency, whole).tp - step(without_latency, whole._replace(ep=2)).tp
    microbatches = OF_EXPERTS.microbatches(whole)
    sent = seconds * LINK * 1e9 * OF_EXPERTS.device.nvlink_gb_per_second / microbatches
    assert sent / 2**30 == pytest.approx(1729 / 32, rel=0.01)


def test_stages_of_one_node_send_over_its_links():
    inside = Choice(pp=4, dp_shard=2)
    assert step(OF_8B, inside).sends == step(slow_network(OF_8B), inside).sends
    assert step(OF_8B, inside).sends < step(OF_8B._replace(node=4), inside).sends


@pytest.mark.parametrize(
    ("recipe", "schedule"), [("llama_8b", "1F1B"), ("gemma3_12b", "1F1B"), ("llama_8b", "Interleaved1F1B")]
)
def test_the_bubble_is_that_of_the_stages_that_a_run_makes(recipe, schedule):
    of, choice, microbatches = job(recipe), Choice(pp=8, schedule=schedule), 32
    seconds = step(of._replace(global_batch=microbatches), choice)
    keys = {"parallelism.pipeline_parallel_degree": 8, "parallelism.pipeline_parallel_schedule": schedule}
    config = read_config(f"train_configs/{recipe}.toml", []).with_keys(keys)
    family = family_of(config.model)
    costs = stage_costs(config, family, on_meta(family, config))
    with simulated_ranks(8):
        order = orders(schedule, 8, microbatches, len(costs))
    busy = seconds.matmuls + seconds.attention + seconds.elementwise
    assert seconds.bubble / (busy + seconds.bubble) == pytest.approx(
        rehearse(order, costs, [2 * each for each in costs]).bubble, abs=0.02
    )


def test_a_rank_updates_whole_experts_where_the_ranks_divide_neither_their_number_nor_their_rows():
    """Of 8 experts with matrices of 4,096 x 14,336 on 24 ranks, 8 ranks have one each, and the others none."""
    of = job("mixtral_8x7b")
    experts = sum(often * layer.expert_parameters(of.shape.dim) for layer, often in of.shape.layers)
    eight, ranks = (parameters_of_rank(of, Choice(dp_shard=ranks)) for ranks in (8, 24))
    assert eight - ranks == pytest.approx((8 * eight - experts) * (1 / 8 - 1 / 24))


def test_candidates_divide_the_ranks_and_fit_and_are_sorted():
    found = candidates(JOB, 256, "tokens_per_second")
    assert found and all(each.choice.ranks == 256 for each in found)
    assert [each.seconds.total for each in found] == sorted(each.seconds.total for each in found)
    assert max(each.memory for each in found) < JOB.device.memory_gib * 2**30
    assert len({each.choice[:6] for each in found}) < len(found), "a mesh has several microbatches and ways to recompute"
    least = candidates(JOB, 256, "memory")[0]
    assert least.memory == min(memory(JOB, each) for each in choices(JOB, 256))
    assert not candidates(job("llama_405b"), 8, "memory"), "405B parameters fit no 8 GPUs"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_mesh_is_a_candidate_where_a_run_accepts_its_parts_of_a_sequence(tp, cp):
    of_8b = job("llama_8b")
    uneven = of_8b._replace(shape=of_8b.shape._replace(vocab=128_257))  # which no degree divides, and a run accepts
    config = read_config("train_configs/llama_8b.toml", [])
    degrees = {"context_parallel_degree": cp, "tensor_parallel_degree": tp}
    for seq_len in (4095, 4096, 4104, 4112, 8 * 515):
        values = {"training": {"seq_len": seq_len}, "parallelism": degrees}
        changed = {section: getattr(config, section).model_copy(update=keys) for section, keys in values.items()}
        refused = any("seq_len" in fault for fault in mesh.faults(config.model_copy(update=changed), 16))
        found = {(each.cp, each.tp) for each in choices(uneven._replace(seq_len=seq_len), 16)}
        assert ((cp, tp) in found) != refused, seq_len


def test_a_microbatch_is_any_part_of_a_ranks_share_of_the_batch():
    found = {each.microbatch for each in choices(OF_8B._replace(global_batch=8 * 15), 8) if each.replicas == 8}
    assert found == {1, 3, 5, 15}


CHUNKS = ("--activation_checkpoint.sequence_chunks", "2")
WHOLE = Choice(dp_shard=2, microbatch=2)
RECOMPUTED = WHOLE._replace(recompute="full")
# options; choices, of which the last one is found; what the only refusal names
REFUSALS: dict[str, tuple[tuple[str, ...], list[Choice], str]] = {
    "heads": ((), [Choice(tp=8), Choice(dp_shard=2, tp=8), Choice(pp=2, tp=8), Choice(tp=4)], "n_kv_heads = 4"),
    "options that exclude each other": (
        CHUNKS,
        [Choice(tp=2, recompute="full"), Choice(dp_shard=2, tp=2, recompute="full"), RECOMPUTED],
        "tensor_parallel_degree",
    ),
    "experts before PyTorch 2.13": (
        ("--model.name", "qwen3_moe"),
        [Choice(dp_shard=2, ep=2), Choice(dp_replicate=2, dp_shard=2, ep=2), WHOLE],
        "needs PyTorch 2.13",
    ),
    "no experts": ((), [Choice(dp_shard=4, ep=2), Choice(dp_shard=2, ep=2), WHOLE], "no Experts"),
    "stages of so many blocks": (
        ("--parallelism.pipeline_parallel_layers_per_stage", "1"),
        [
            *(Choice(pp=4, dp_shard=number, schedule="Interleaved1F1B", microbatch=1) for number in (1, 2, 4)),
            Choice(pp=2, schedule="Interleaved1F1B", microbatch=1),
        ],
        "needs a multiple of 4 stages, at least 8, and of 4 blocks pipeline_parallel_layers_per_stage = 1 makes 4",
    ),
    "float8 shards of unequal rows": (
        ("--float8.enable", "true", "--float8.enable_fsdp_float8_all_gather", "true", "--training.global_batch_size", "96"),
        [Choice(dp_shard=3), Choice(dp_replicate=2, dp_shard=3), Choice(dp_shard=3, microbatch=2), WHOLE],
        "data_parallel_shard_degree x context_parallel_degree = 3 ranks do not divide the rows",
    ),
    "more stages than blocks": ((), [Choice(pp=64), Choice(pp=64, dp_shard=2), WHOLE], "pipeline_parallel_degree = 64"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_value_that_every_mesh_refuses_is_tried_once(name, monkeypatch):
    """40 meshes with the same refused degree were tried, and no other one."""
    words, of_refusal, named = REFUSALS[name]
    of = job("llama_124m", "--model.flavor", "debug", *words)
    monkeypatch.setattr(expert, "BEFORE_2_13", True)
    monkeypatch.setattr(tool, "BEFORE_2_13", True)  # measures nothing
    found = [Candidate(choice, step(JOB, GOOD), 0.0) for choice in of_refusal]
    words = ("--model.flavor", "debug", *words)
    winners, refused, gave_up = tool.sound(found, "train_configs/llama_124m.toml", words, of, 5)
    assert [each.choice for each in winners] == of_refusal[-1:] and not gave_up
    assert len(refused) == 1 and named in refused[0]


def test_giving_up_is_said_beside_the_meshes_that_were_found(monkeypatch):
    monkeypatch.setattr(tool, "BEFORE_2_13", True)
    monkeypatch.setattr(tool, "_TRIED", 1)
    file, words = "train_configs/llama_124m.toml", ("--model.flavor", "debug")
    of, config = job("llama_124m", *words), read_config(file, list(words))
    found = [Candidate(choice, step(JOB, GOOD), 0.0) for choice in (WHOLE, Choice(tp=8), Choice(tp=16))]
    winners, refused, gave_up = tool.sound(found, file, words, of, 5)
    assert [each.choice for each in winners] == [WHOLE]
    assert any(
        line.endswith("; plan gave up after these") for line in tool.lines(winners, config, of, 2, "h100", refused, gave_up)
    )
    assert tool.sound(found[:2], file, words, of, 5)[2] is False


@pytest.mark.parametrize(("key", "value"), [("sequence_chunks", "4"), ("offload", "true")])
@pytest.mark.parametrize("given", ["file", "options"])
def test_keys_that_have_no_effect_on_a_mesh_do_not_refuse_it(given, key, value, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "BEFORE_2_13", True)
    file, words = tmp_path / "run.toml", [f"--activation_checkpoint.{key}", value]
    base = f'base = "{ROOT}/train_configs/llama_124m.toml"\nmodel.flavor = "debug"\n'
    if given == "file":
        base, words = f'{base}[activation_checkpoint]\nmode = "full"\n{key} = {value}\n', []
    file.write_text(base)
    of = read_job(read_config(str(file), []), "h100", 8)
    winners, refused, _ = tool.sound([Candidate(WHOLE, step(of, WHOLE), 0.0)], str(file), words, of, 5)
    assert [each.choice for each in winners] == [WHOLE] and not refused


def test_a_mesh_fits_by_the_state_that_its_optimizer_keeps():
    """70B on 8 GPUs of 141 GB: half of the moments for the matrices of blocks leave room, and an EMA takes some."""
    adam, muon = (job("llama_70b", "--optimizer.name", name, device="h200") for name in ("AdamW", "Muon"))
    assert not candidates(adam, 8, "memory") and candidates(muon, 8, "memory")
    averaged = job("llama_70b", "--optimizer.ema_decay", "0.99", "--checkpoint.enable", "true", device="h200")
    assert (adam.state_bytes, averaged.state_bytes) == (8, 12) and 4 < muon.state_bytes < 4.2
    kept_nowhere = job("llama_70b", "--optimizer.ema_decay", "0.99", "--checkpoint.enable", "false", device="h200")
    assert kept_nowhere.state_bytes == 8


def test_experts_are_split_only_where_they_are_divisible():
    degrees = {each.ep for each in choices(OF_EXPERTS, 32)}
    assert {1, 2, 32} <= degrees and {each.ep for each in choices(JOB, 64)} == {1}
    assert {(each.ep, each.ep_node) for each in choices(OF_EXPERTS, 16)} == {*((ep, 1) for ep in (1, 2, 4, 8, 16)), (16, 8)}
    assert keys_of(EXPERTS._replace(ep=16, ep_node=8))[NODE_SIZE] == 8 and NODE_SIZE not in keys_of(GOOD)


@pytest.mark.parametrize(
    ("recipe", "words", "named"),
    [
        ("llama_70b", ["--parallelism.tensor_parallel_degree", "8"], "parallelism.tensor_parallel_degree"),
        ("llama_70b", ["--training.global_batch_size", "-1"], "training.global_batch_size"),
        ("llama_70b", ["--training.mixed_precision_param", "float32"], "training.mixed_precision_param"),
        ("llama_70b_lora", [], "is frozen, by lora.enable"),
        ("llama_8b", ["--optimizer.groups", '[{pattern = "layers.*", frozen = true}]'], "is frozen, .* optimizer.groups"),
        ("llama_8b", ["--parallelism.reduce_every_microbatch", "false"], "parallelism.reduce_every_microbatch"),
        ("llama_8b", ["--model.overrides.n_kv_heads", "5"], "n_kv_heads = 5.*: a forward pass fails"),
        ("llama_8b", ["--activation_checkpoint.selective_ac_option", "2"], "activation_checkpoint.selective_ac_option"),
        ("llama_8b", ["--float8.enable", "true", "--float8.emulate", "true"], "float8.emulate"),
        ("llama_8b", ["--float8.enable", "true", "--float8.recipe_name", "rowwise_with_gw_hp"], "float8.recipe_name"),
    ],
)
def test_what_the_model_of_time_does_not_know_is_refused(recipe, words, named):
    with pytest.raises(UserError, match=named):
        job(recipe, *words)


def test_blocks_are_compiled_only_where_the_model_is_among_the_components():
    assert job("llama_8b").compiled and not job("llama_8b", "--compile.components", "loss").compiled


@pytest.mark.parametrize(
    ("words", "exposed", "widest"),
    [("true", 0.4, 8), ("true --float8.enable true", 0.8, 8), ("true --compile.backend eager", 1, 32), ("false", 1, 32)],
)
def test_async_tensor_parallelism_counts_inside_of_a_node_where_inductor_compiles_blocks(words, exposed, widest):
    of = job("llama_8b", *f"--parallelism.enable_async_tensor_parallel true --compile.enable {words}".split())
    assert of.exposed_tp == exposed and max(each.tp for each in choices(of, 64)) == widest
    found = {each.tp for each in choices(of._replace(seq_len=3 * 2048, global_batch=96), 48)}
    assert (3 in found) == (exposed == 1)  # 3 ranks are not all in one of the nodes of 8


@pytest.mark.parametrize(
    "choice",
    [
        *(Choice(tp=2, reshard=each, microbatch=4, recompute="full") for each in (True, False)),
        Choice(pp=2, dp_shard=2, schedule="Interleaved1F1B"),
    ],
    ids=str,
)
def test_a_choice_replaces_the_values_of_the_file(tmp_path, choice):
    (tmp_path / "base.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "debug"\n[activation_checkpoint]\nmode = "selective"\n'
        '[parallelism]\nfsdp_reshard_after_forward = "never"\npipeline_parallel_degree = 2\n'
    )
    assert choice_of(tool.chosen_config(str(tmp_path / "base.toml"), [], choice), choice.ranks) == choice


def test_the_command_prints_a_mesh_that_check_accepts_and_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"plan {ROOT}/train_configs/llama_124m.toml --model.flavor debug --gpus 2 --top 2 "
    words += "--parallelism.enable_async_tensor_parallel true --output best.toml --trace step.json"
    monkeypatch.setattr(sys, "argv", words.split())
    tool.main()
    trace = json.loads(Path("step.json").read_text())
    assert trace["traceEvents"] and trace["displayTimeUnit"] == "ms"
    out, err = capsys.readouterr()
    assert "  2. " in out and "about" in out and "error: 10% on average" in out
    assert "enable_async_tensor_parallel = true (option): has no effect unless parallelism.tensor_parallel_degree > 1" in err
    check(read_config("best.toml", []), "best.toml", 2, open_files=False, elsewhere=True)
    printed = re.search(r"--training.local_batch_size (\d+)", out)
    assert printed and read_config("best.toml", []).training.local_batch_size == int(printed[1])
    assert read_config("best.toml", []).model.flavor == "debug", "what the options say is a part of it"


def test_the_base_of_an_output_is_found_through_links(tmp_path):
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "base.toml").write_text("[training]\nsteps = 7\n")
    (tmp_path / "outputs").symlink_to(tmp_path / "far/away")
    tool.write(tmp_path / "outputs/best.toml", str(tmp_path / "base.toml"), {"training.seq_len": 64})
    found = read_config(tmp_path / "outputs/best.toml", []).training
    assert (found.steps, found.seq_len) == (7, 64)


def test_none_which_no_file_with_a_base_can_say_is_not_left_out_of_the_output(tmp_path, monkeypatch):
    words = f"--gpus 8 --output {tmp_path}/best.toml --lr_scheduler.decay_ratio none"
    monkeypatch.setattr(sys, "argv", ["plan", "train_configs/llama_3b.toml", *words.split()])
    with pytest.raises(UserError, match=r"--lr_scheduler\.decay_ratio: none cannot be written into a file"):
        tool.main()


@pytest.mark.parametrize(
    "choice",
    [
        GOOD,
        pytest.param(Choice(pp=4, dp_shard=8, tp=8, schedule="Interleaved1F1B", microbatch=4), id="Interleaved1F1B"),
    ],
)
def test_a_trace_ends_with_the_predicted_step_and_its_rows_do_not_overlap(choice):
    drawn, seconds = events(JOB, choice), step(JOB, choice)
    passes = [each for each in drawn if each["ph"] == "X"]
    assert max(each["ts"] + each["dur"] for each in passes) == pytest.approx(1e6 * seconds.total)
    assert {each["pid"] for each in passes} == set(range(choice.pp))
    for rank in range(choice.pp):
        compute, communication = ([e for e in passes if (e["pid"], e["tid"]) == (rank, row)] for row in (1, 2))
        for row in (compute, communication):
            row.sort(key=lambda each: each["ts"])
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(row))
        computed = seconds.matmuls + seconds.attention + seconds.elementwise + seconds.optimizer
        waited = seconds.fsdp + seconds.tp + seconds.cp + seconds.ep + seconds.sends
        assert sum(each["dur"] for each in compute) == pytest.approx(1e6 * computed)
        assert sum(each["dur"] for each in communication) == pytest.approx(1e6 * waited)


def test_a_trace_is_of_the_trace_event_format():
    """Fields and types as "Trace Event Format" (Google, 2016) has them: complete events, and metadata that names their rows."""
    drawn = json.loads(
        json.dumps(events(JOB, Choice(pp=4, dp_shard=8, tp=8, schedule="Interleaved1F1B", microbatch=4)), allow_nan=False)
    )
    types = {"name": str, "ph": str, "pid": int, "tid": int}
    of_phase = {"X": types | {"ts": float, "dur": float}, "M": types | {"args": dict}}
    named = set()
    for each in drawn:
        assert {key: type(value) for key, value in each.items()} == of_phase[each["ph"]], each
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "thread_name") and type(each["args"].get("name")) is str, each
            named.add((each["pid"], each["tid"]))
        else:
            assert each["ts"] >= 0 and each["dur"] > 0 and (each["pid"], each["tid"]) in named, each


def test_a_mesh_whose_fastest_choice_does_not_fit_by_estimate_gets_one_that_holds_less(capsys, monkeypatch):
    """The search's sum of memory errs by a fifth, and lacks an EMA. On one GPU no other mesh is left."""
    of, estimated, tried = job("llama_124m"), [80 * 2**30, 70 * 2**30], []

    def measured(config: Config, ranks: int, device: str) -> int:
        tried.append(memory(of, choice_of(config, ranks)))
        return estimated[len(tried) - 1]

    monkeypatch.setattr(tool, "predicted", measured)
    monkeypatch.setattr(tool, "BEFORE_2_13", False)  # before which nothing is measured
    monkeypatch.setattr(sys, "argv", ["plan", "train_configs/llama_124m.toml", "--gpus", "1"])
    tool.main()
    assert "  1. " in (out := capsys.readouterr().out) and "  better candidates are refused" in out
    assert tried[0] == candidates(of, 1, "tokens_per_second")[0].memory and tried[1] < tried[0] * 75 / 80


def test_where_no_mesh_fits_the_command_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan", "train_configs/llama_405b.toml", "--gpus", "8"])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 1 and "no mesh of 8 x h100 fits" in capsys.readouterr().out


@pytest.mark.parametrize("tried", [2, 40])
def test_a_recomputation_that_is_refused_on_a_mesh_does_not_end_the_search(tried, capsys, monkeypatch):
    def check(config: Config, _path: str, ranks: int, **_: Any) -> None:
        if (mode := config.activation_checkpoint.mode) != "full":
            raise Faults("", [f"{mode} on {ranks} ranks"])

    monkeypatch.setattr(tool, "check", check)
    monkeypatch.setattr(tool, "_TRIED", tried)
    monkeypatch.setattr(tool, "predicted", lambda *_: 0)
    monkeypatch.setattr(sys, "argv", ["plan", "train_configs/llama_124m.toml", "--model.flavor", "debug", "--gpus", "2"])
    with contextlib.suppress(SystemExit):
        tool.main()
    out = capsys.readouterr().out
    assert "recompute full: " in out if tried == 40 else "gave up after 2 refusals" in out


def test_a_fault_that_every_mesh_has_is_one_of_the_configuration(monkeypatch):
    values = {"model.name": "tests.tiny", "model.flavor": "plain", "training.mixed_precision_param": "bfloat16"}
    words = [word for key, value in {**values, "training.global_batch_size": "64"}.items() for word in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["plan", "train_configs/llama_debug.toml", "--gpus", "8", *words])
    with pytest.raises(Faults, match=r"1 fault\n  model.hf_assets_path: the default tokenizer"):
        tool.main()


@pytest.mark.slow
def test_the_error_that_is_printed_is_the_score(monkeypatch):
    shapes: dict[tuple[str, int], Shape] = {}

    def shape_once(run: Run, models: dict[str, Dimensions]) -> Shape:
        key = run.model, run.seq_len
        if key not in shapes:
            shapes[key] = shape_of(run, models)
        return shapes[key]

    monkeypatch.setattr("benchmarks.plan_score.shape_of", shape_once)  # a model has many rows, and takes a second
    scored, left = score(FILE.read_text(encoding="utf-8"))
    found = by_device(scored)
    assert found.keys() == ERRORS.keys()
    for name, errors in found.items():
        assert errors == pytest.approx(ERRORS[name], abs=0.002), name
    assert len(scored) + len(left) == 350


STAGES_OF_8B = "--parallelism.pipeline_parallel_degree 4 --parallelism.data_parallel_shard_degree 2"
FULL = "--activation_checkpoint.mode full"
# (options, ranks, GiB by titanlite estimate RECIPE OPTIONS --ranks RANKS)
ESTIMATED = [
    ("llama_8b", f"--parallelism.fsdp_reshard_after_forward never {FULL}", 8, 38.7),
    ("llama_8b", f"{STAGES_OF_8B} --parallelism.pipeline_parallel_schedule GPipe", 8, 142.3),
    ("qwen3_30b_a3b", f"--parallelism.tensor_parallel_degree 4 --parallelism.expert_parallel_degree 1 {FULL}", 32, 61.9),
]
RECIPES = ["llama_8b_128k", "llama_405b", "deepseek_v3", "gemma3_12b", "qwen3_30b_a3b"]


@pytest.mark.parametrize(("recipe", "words", "ranks", "measured"), [*((recipe, "", 0, 0) for recipe in RECIPES), *ESTIMATED])
def test_the_sum_of_a_ranks_memory_is_near_the_estimate(recipe, words, ranks, measured):
    path = Path(f"train_configs/{recipe}.toml")
    if not words:
        measured, ranks = map(int, re.search(r"Memory a rank: (\d+) GiB .*--ranks (\d+)", path.read_text()).groups())
    config = read_config(path, words.split())
    of = job_of(config, "h100", 8, config.training.global_batch_size)
    assert memory(of, choice_of(config, ranks)) / 2**30 == pytest.approx(measured, rel=MEMORY_ERROR)
