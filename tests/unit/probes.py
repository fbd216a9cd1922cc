"""The probes: what a key changes is seen by running what reads it. tests/unit/test_probes.py changes every key.

Ranks are pretended; what waits, writes much or compiles is recorded instead.
"""

import functools
import gc
import json
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as partitioner
from torch.distributed.fsdp import FSDPModule

from models.moe import experts_of
from tests.distributed.scenarios import learnable_ids
from tests.token_files import data_of
from titanlite import train as loop
from titanlite.checkpoint import folder as saves
from titanlite.checkpoint import load
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.schema import Config
from titanlite.data import batches as reading
from titanlite.data.sources import sources_of
from titanlite.errors import UserError
from titanlite.launch import process
from titanlite.loop import divergence, profiling, resume
from titanlite.loop.resume import Progress, Setting, numbers_of
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.optim.lr_schedule import build_schedule
from titanlite.parallel import fsdp, parallelize
from titanlite.parallel.mesh import build_mesh, resolve_degrees
from titanlite.plan.step import pretended_ranks
from titanlite.tools import check as check_tool
from titanlite.transforms import float8
from titanlite.transforms.attention_kernels import attention_sentence
from titanlite.transforms.initialize import initialize
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import family_of

CPU = torch.device("cpu")
VOCABULARY = 512
Probe = Callable[[Config, int], object]


def recorder(seen: list, name: str, result: Any = None) -> Callable[..., Any]:
    """A function that only notes its arguments, and returns `result`."""

    def record(*values: Any, **named: Any) -> Any:
        seen.append((name, *[repr(value) for value in values if isinstance(value, int | float | str | Path | list)], named))
        return result

    return record


def data(config: Config) -> Any:
    ids = learnable_ids(VOCABULARY)
    return data_of([ids[start : start + 7 + start % 50] for start in range(0, 3000, 50)], config, VOCABULARY)


# ---------------------------------------------------------------------------------------------------------------- probes


def schedule(config: Config, ranks: int) -> object:
    return [build_schedule(config).at(step) for step in range(1, 61)]


def weights(config: Config, ranks: int) -> object:
    """Parameters with their initial values, adapters, and layers of float8."""
    family = family_of(config.model)
    model = on_meta(family, config)
    found = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    found += [(name, getattr(module, "scale", None)) for name, module in model.named_modules()]
    float8.convert(model, config)
    found += [(name, type(module).__name__, repr(getattr(module, "config", ""))) for name, module in model.named_modules()]
    if not config.float8.enable:
        model = on_meta(family, config)
        initialize(model, family, config.training.seed, CPU)
        found += [p.double().sum().item() for p in model.parameters()]
    return found


def layout(config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """What is done to a model on a mesh, and which gradients are reduced when."""
    seen: list[Any] = []
    shard = fsdp.fully_shard

    def sharded(module: Any, **options: Any) -> Any:
        seen.append((type(module).__name__, options["reshard_after_forward"], options["mp_policy"], options["offload_policy"]))
        return shard(module, **options)

    monkeypatch.setattr(fsdp, "fully_shard", sharded)
    monkeypatch.setattr(
        torch, "compile", lambda function, **named: seen.append(("compile", function.__name__, named)) or function
    )
    monkeypatch.setattr(parallelize, "overlap_tensor_parallel", lambda enable, _: seen.append(("overlap", enable)))
    monkeypatch.setattr(parallelize, "cast_where_used", lambda _, *cast, **named: seen.append(("cast", cast, named)))
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        monkeypatch.setattr(FSDPModule, name, lambda _, modules: seen.append(("prefetch", len(modules))))
    try:
        degrees = resolve_degrees(config.parallelism, ranks)
    except UserError as error:
        return str(error)
    with pretended_ranks(ranks):
        mesh = build_mesh(degrees, "cpu")
        model = parallelize.parallelize(family_of(config.model), config, mesh, CPU)
        parts = mesh["dp_replicate"].size() * mesh["dp_shard"].size()
        seen += [mesh.shape, attention_sentence(model, config), getattr(model.head, "z_loss", 0.0)]
        seen.append(model.context and model.context[1])
        seen += [experts.exchange and experts.exchange[1:] for experts in experts_of(model)]
    seen += [(type(part).__name__, type(part.forward).__name__) for part in model.layers.modules()]
    seen.append(partitioner.activation_memory_budget)
    if model.pipeline is not None:
        return (
            seen,
            model.pipeline.schedule_name,
            model.pipeline.microbatches,
            [[*each.part.layers] for each in model.pipeline.stages],
        )
    if not isinstance(model, FSDPModule):
        return seen  # nothing is reduced
    microbatches, deferred = config.global_batch(parts) // (config.training.local_batch_size * parts), fsdp.Deferred.of(config)
    return seen, [
        (last or not deferred.shards, last or not deferred.replicas) for last in [False] * (microbatches - 1) + [True]
    ]


def steps(config: Config, ranks: int) -> object:
    """Three steps of training: norms, weights, and the kind of optimizer."""
    with pretended_ranks(1):
        mesh = build_mesh(resolve_degrees(config.parallelism, 1), "cpu")
        model, optimizer, scale = begin_training(family_of(config.model), config, mesh, CPU)
        batch = reading.Batches(reading.StepDataset(config, data(config), 0, config.global_batch(1), (0, 1)))
        found: list[Any] = [type(optimizer).__name__, {name: optimizer.defaults.get(name) for name in ("fused", "foreach")}]
        for _ in range(3):
            loss = forward_backward(model, next(batch), mesh, scale, fsdp.DEFERRED)
            found += [loss.share.item(), update(model, optimizer, 0.01, config.training.max_norm, scale, loss.labels).item()]
        batch.close()
    return found + [p.double().sum().item() for p in model.parameters()]


def batches(config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """What is read, how, and the shape of microbatches."""
    seen: list[Any] = []
    monkeypatch.setattr(reading, "_read_ahead", lambda dataset, _: seen.append(dataset.cfg.prefetch) or iter(()))
    monkeypatch.setattr(reading, "_StallWatch", lambda _, seconds: seen.append(seconds) or unittest.mock.MagicMock())
    dataset = reading.StepDataset(config, data(config), 0, config.global_batch(1), (0, 1))
    reading.Batches(dataset)
    batch = dataset[0]
    seen += [None if part is None else (part.shape, part.tolist()) for part in batch]
    return seen, [(source.path, source.weight) for source in sources_of(config, "training")]


def run(config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch, newest: int | None = None) -> object:
    """A whole run of a few steps: every file, the facts at its start, and what it does when."""
    seen: list[Any] = []

    class Saver:
        group = None

        def __init__(self, folder: Path, cfg: Any, seconds: int):
            seen.append((str(folder), cfg.async_mode, seconds if ranks > 1 else None, saves.superfluous(range(1, 40), cfg)))

        def save(self, step: int, *_: Any) -> None:
            seen.append(("save", step))

        poll = finish = newest = lambda self: None

    class Profile:
        def __init__(self, **_: Any):
            self.prepare_trace = self.start_trace = self.stop_trace = lambda: None
            self.export_chrome_trace = lambda path: seen.append(("trace", path))

    numbers = {"step": newest, "architecture": {}, "config": {"checkpoint": {}}}
    found = (Path("newest"), Manifest(numbers, {})) if newest is not None else None
    monkeypatch.setattr(load, "newest_sound", lambda folder: found)
    monkeypatch.setattr(load, "verified", lambda source: Manifest(numbers, {}))
    monkeypatch.setattr(load, "load_tensors", lambda source, _, tensors, exclude, *more: seen.append((str(source), exclude)))
    monkeypatch.setattr(resume, "refuse_foreign", lambda *_: None)
    monkeypatch.setattr(resume, "find_weights", lambda source, family, model, exclude: seen.append(("hf", str(source))) or {})
    monkeypatch.setattr(resume, "load_weights", lambda *_: None)
    monkeypatch.setattr(
        resume,
        "load_run",
        lambda source, _, setting, tensors, elsewhere: (
            seen.append(("resumed", str(source))) or (Progress(0, 0, setting.data.beginning()), build_schedule(setting.config))
        ),
    )
    monkeypatch.setattr(type(family_of(config.model)), "changes_since", lambda *_: [])
    monkeypatch.setattr(loop, "Saver", Saver)
    monkeypatch.setattr(loop, "try_out", lambda _: None)
    monkeypatch.setattr(loop, "clean_up", lambda *_: None)
    monkeypatch.setattr(loop, "save_in_hf", recorder(seen, "exported"))
    monkeypatch.setattr(
        loop, "sample_texts", lambda _, config, *__: [repr((config.validation.sample_prompts, config.validation.sample_tokens))]
    )
    monkeypatch.setattr(loop, "open_tokenizer", lambda *_: object())
    monkeypatch.setattr(loop.Reporter, "samples", lambda _, step, texts: seen.append((step, texts)))
    monkeypatch.setattr(profiling, "profile", Profile)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", recorder(seen, "history"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", recorder(seen, "snapshot"))
    monkeypatch.setattr(process, "set_timeout", lambda seconds, but: seen.append(seconds if ranks > 1 else None))
    monkeypatch.setattr(gc, "collect", lambda *_: seen.append("collected"))
    monkeypatch.setattr(loop.Stop, "__init__", lambda self, minutes: seen.append(("limit", minutes)))
    monkeypatch.setattr(loop.Stop, "agreed", lambda self: None)
    monkeypatch.setattr(loop.Stop, "close", lambda self: None)
    monkeypatch.setattr(
        loop,
        "record_start",
        lambda config, _: seen.append(config.job.description) or Path(config.job.dump_folder).mkdir() or [],
    )
    with pretended_ranks(1):
        mesh = build_mesh(resolve_degrees(config.parallelism, 1), "cpu")
        read = data(config)
        loop.train(config, read, read if config.validation.enable else None, mesh, CPU, 0.0, None)
        seen += [
            (source.path, source.name) for source in (sources_of(config, "validation") if config.validation.enable else ())
        ]
    gc.enable()
    written = sorted(
        str(path.parent if path.name.startswith("events") else path) for path in Path.cwd().rglob("*") if path.is_file()
    )
    for path in Path.cwd().rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        written += [str((line["step"], line.get("validation_loss"))) for line in lines]
    return seen, [line.replace(str(Path.cwd()), "") for line in written]


resumed = functools.partial(run, newest=9)
resumed.__name__ = "resumed"  # type: ignore[attr-defined]


def spikes(config: Config, ranks: int) -> object:
    """What is found in a row of losses, one of them high, one not finite."""
    found = divergence.Spikes(config.metrics.spike_window, config.metrics.spike_threshold)
    losses = [divergence.Step(number, number, 2.0 + number % 3 / 10 + (number == 70) * 1.5, 1.0) for number in range(1, 80)]
    return [step.number for step, _ in found.find(losses)]


def bad_step(config: Config, ranks: int) -> object:
    """What follows a loss that is not finite."""
    incidents = divergence.Incidents(config, 8, 1, active=False)
    try:
        return repr(incidents.judge([divergence.Step(1, 0, float("nan"), 1.0)], None, None))
    except Exception as error:
        return str(error)


def changed(config: Config, ranks: int) -> object:
    """Whether a run may continue with another learning rate."""
    before = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.5})})
    family, read = family_of(config.model), data(config)
    numbers = numbers_of(Setting(before, family, read, 8), build_schedule(before), Progress(1, 8, read.beginning()))
    try:
        return resume.check_changes(Setting(config, family, read, 8), Path("source"), Manifest(numbers, {}))
    except Exception as error:
        return str(error)[:40]


def start(config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """What a process does before it trains."""
    seen: list[Any] = []
    environment: dict[str, str] = {}
    profiling.record_collectives(config, environment)
    monkeypatch.setattr(process, "use_deterministic_algorithms", recorder(seen, "deterministic"))
    monkeypatch.setattr(
        process.dist, "init_process_group", lambda *_, timeout, **__: seen.append(timeout if ranks > 1 else None)
    )
    process.start(config, {})
    return seen, environment


def printed(config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """What `titanlite check` prints."""
    monkeypatch.setattr(check_tool, "check_here", lambda *_: [])
    Path("run.toml").write_text(f"[job]\nprint_config = {str(config.job.print_config).lower()}\n")
    monkeypatch.setattr("sys.argv", ["titanlite check", "run.toml"])
    check_tool.main()
    return bool(capsys.readouterr().out)


def tokenizer(config: Config, ranks: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """Which tokenizer the data is opened with."""
    from titanlite.data import mixture

    seen: list[Any] = []
    monkeypatch.setattr(mixture, "open_tokenizer", lambda *values: seen.append(values) or (_ for _ in ()).throw(LookupError))
    with pytest.raises(LookupError):
        mixture.open_data(config)
    return seen


def _of(probe: Probe | Callable[..., object], keys: str) -> dict[str, Callable[..., object]]:
    return dict.fromkeys(keys.split(), probe)


PROBES: dict[str, Callable[..., object]] = {
    **_of(
        schedule,
        "training.steps optimizer.lr lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio"
        " lr_scheduler.decay_type lr_scheduler.min_lr_factor",
    ),
    **_of(
        weights,
        "model.name model.flavor model.overrides training.seed training.dtype lora.enable lora.rank lora.alpha lora.modules"
        " float8.enable float8.recipe_name float8.filter_fqns float8.enable_fsdp_float8_all_gather float8.emulate",
    ),
    **_of(
        layout,
        "model.attention training.z_loss training.mixed_precision_param training.mixed_precision_reduce"
        " parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree"
        " parallelism.context_parallel_degree parallelism.context_parallel_method"
        " parallelism.expert_parallel_degree moe.max_tokens_factor"
        " parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_schedule"
        " parallelism.pipeline_parallel_layers_per_stage"
        " parallelism.fsdp_reshard_after_forward parallelism.fsdp_prefetch parallelism.reduce_every_microbatch"
        " parallelism.enable_async_tensor_parallel parallelism.cpu_offload activation_checkpoint.mode"
        " activation_checkpoint.selective_ac_option activation_checkpoint.memory_budget activation_checkpoint.sequence_chunks"
        " activation_checkpoint.offload compile.enable compile.components"
        " compile.backend",
    ),
    **_of(
        steps,
        "optimizer.name optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.momentum optimizer.nesterov optimizer.ns_steps"
        " optimizer.weight_decay optimizer.decay_parameters optimizer.implementation optimizer.rounding training.max_norm"
        " moe.bias_update_speed moe.balance_loss moe.router_z_loss",
    ),
    **_of(
        batches,
        "training.dataset training.dataset_path training.sources training.document_policy training.document_mask"
        " training.local_batch_size training.global_batch_size training.seq_len dataloader.workers dataloader.prefetch"
        " dataloader.stall_seconds",
    ),
    **_of(
        run,
        "job.dump_folder job.description job.time_limit_minutes training.gc_freq checkpoint.enable checkpoint.folder"
        " checkpoint.interval checkpoint.async_mode checkpoint.keep_latest_k checkpoint.keep_every_n_steps"
        " checkpoint.initial_load_path checkpoint.initial_load_model_only checkpoint.initial_load_in_hf"
        " checkpoint.last_save_in_hf checkpoint.exclude_from_loading metrics.log_freq metrics.enable_tensorboard"
        " metrics.save_tb_folder"
        " profiling.enable_profiling profiling.profile_freq profiling.save_traces_folder profiling.enable_memory_snapshot"
        " profiling.save_memory_snapshot_folder validation.enable validation.dataset validation.dataset_path validation.sources"
        " validation.freq validation.steps validation.sample_prompts validation.sample_tokens comm.train_timeout_seconds"
        " comm.save_timeout_seconds",
    ),
    **_of(resumed, "checkpoint.load_step"),
    **_of(changed, "checkpoint.allow_changes"),
    **_of(spikes, "metrics.spike_window metrics.spike_threshold"),
    **_of(bad_step, "training.on_nonfinite"),
    **_of(start, "training.deterministic comm.init_timeout_seconds comm.trace_buf_size"),
    **_of(printed, "job.print_config"),
    **_of(tokenizer, "model.hf_assets_path training.add_bos"),
}
