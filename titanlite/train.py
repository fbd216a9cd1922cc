"""The training loop, top to bottom; the only file that knows all the others.

TOML -> Config -> mesh -> model on meta -> sharded -> materialized and initialized -> optimizer -> checkpoint restored ->
the loop {global batch -> loss -> backward -> clip -> step -> report -> checkpoint}.

    torchrun ... -m titanlite train CONFIG.toml [--section.key value ...]     (run_train.sh does this)
"""

import contextlib
import functools
import gc
import logging
import os
import secrets
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.folder import check_shared, clean_up, export_folder, step_folder
from titanlite.checkpoint.save import Saver
from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.read import read_words, to_toml
from titanlite.config.schema import Config
from titanlite.data.batches import Batches, steps_of
from titanlite.data.mixture import Data, check_epochs, open_on_every_rank
from titanlite.data.sources import open_tokenizer
from titanlite.ground.errors import UserError
from titanlite.hf.export import export
from titanlite.launch import children, process, stacks
from titanlite.launch.agreement import identity
from titanlite.launch.layout import number
from titanlite.launch.run_folder import RunLock, owned_folders, record_start
from titanlite.launch.stop import EXIT_CODE, UNSAVED, Stop
from titanlite.loop import profiling
from titanlite.loop.checks import check
from titanlite.loop.distillation import digest_of_teacher
from titanlite.loop.divergence import Incidents, Steps
from titanlite.loop.memory import Memory
from titanlite.loop.metrics import Clock, Reporter, console_line, largest_peak_gib, speed
from titanlite.loop.own_code import OwnCode
from titanlite.loop.resume import Progress, RunIdentity, compared, loading_of, numbers_of, restore, stream_at
from titanlite.loop.step import begin_training, forward_backward, update, warn_of_unused
from titanlite.loop.summary import derived_values
from titanlite.loop.validation import sample_texts, validate
from titanlite.optim.balance import load as expert_load
from titanlite.optim.ema import ema_of
from titanlite.optim.lr_schedule import check_ranks
from titanlite.optim.state import run_tensors
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, resolve_degrees, rng_rank
from titanlite.plan import memory as memory_plan
from titanlite.plan.outlook import Outlook, peak_flops
from titanlite.registry.family import family_of
from titanlite.registry.own import source_of_parts
from titanlite.registry.source import source_of
from titanlite.transforms import float8
from titanlite.transforms.compile import RecompilationWatch
from titanlite.transforms.meta import training_flops

log = logging.getLogger("titanlite")


# -------------------------------------------------------------------------------------------------------------- the loop


def train(
    config: Config,
    data: Data,
    validation: Data | None,
    mesh: DeviceMesh,
    device: torch.device,
    started: float,
    lock: RunLock | None = None,
    at_error: contextlib.ExitStack | None = None,
) -> bool:
    """Trains from the newest checkpoint, or from step 0, to `training.steps`; returns whether it was stopped before that.

    validation: the data of [validation], or None where that is not enabled.
    started: time.perf_counter() of the program's start; the first report says how long the start took. lock: of rank 0.
    at_error: what a process that ends after an error closes before.
    Raises UserError when a loss or gradient stops being finite.
    """
    given, config = config, config.settled(Hardware(device.type == "cuda"))
    training, main_rank = config.training, dist.get_rank() == 0
    saves = Path(config.job.dump_folder) / config.checkpoint.folder
    family, global_batch = family_of(config.model), config.global_batch(data_degree(mesh))
    memory = Memory(config, device, global_batch)
    clock = Clock(started, memory.explained)
    watch = profiling.Watch(config, device, clock)
    saver = None
    if config.checkpoint.enable:
        check_shared(saves)
        saver = Saver(saves, config.checkpoint, config.comm.save_timeout_seconds)
        if at_error is not None:
            # os._exit ends the thread that writes; ranks without the error wait in a collective that long
            at_error.callback(saver.wait, 0.8 * config.comm.train_timeout_seconds)
    stop, own_code = Stop(config.job.time_limit_minutes), OwnCode(config)
    group_of_saver = saver.group if saver else None  # a group that keeps its timeout
    longer_than_a_step = functools.partial(process.longer_than_a_step, config.comm, group_of_saver)
    process.set_timeout(config.comm.init_timeout_seconds, group_of_saver)
    with clock.phase(0, "building the model"):
        model, optimizer, loss_scale = begin_training(family, config, mesh, device)
    memory.model, memory.optimizer = model, optimizer
    setting = RunIdentity(config, family, data, global_batch)
    load = functools.partial(restore, setting, model, optimizer, loss_scale, saves)
    with clock.phase(0, "loading the checkpoint"):
        progress, schedule = load()
    check_ranks(schedule, config)
    loading = loading_of(config.checkpoint, own=bool(progress.run))
    progress = progress._replace(run=progress.run or secrets.token_hex(8))  # rank 0 commits checkpoints, with its own
    own_code.after_building(model, config, optimizer)
    facts = derived_values(setting, mesh, model, schedule, progress)
    for name, value in facts.items():
        log.info("%-20s %s", name, value)
    if progress.step >= training.steps:
        finished_already(config, progress, saves, saver)
        return False
    check_epochs(data, progress.timeline, training.steps)
    if saver:
        clean_up(saves, progress.step)
    kept = [stacks.keep, *([lock.keep] if lock else [])]
    if main_rank:
        record = {"values": facts, "global_batch": global_batch, "data": data.describe(), "resumed_step": progress.step}
        record |= {"architecture": family.dimensions(), "model_source": source_of(family.module)}
        record |= {"own_source": source_of_parts(config), "loading": loading, "data_degree": data_degree(mesh)}
        record |= {"compared": compared(config, global_batch, schedule.total_steps), "teacher": digest_of_teacher(config)}
        kept += [file.keep for file in record_start(given, record)]

    def batches_from(at: Progress) -> Batches:
        part = data_rank(mesh), data_degree(mesh)
        return Batches(steps_of(config, data, part, at.timeline, at.step + 1, at.stream), device)

    first, batches = progress.step + 1, batches_from(progress)
    reporter = Reporter(config, first, active=main_rank)
    peak, flops = peak_flops(device, training.mixed_precision_param), training_flops(family, config)
    measure_speed = functools.partial(speed, clock, global_batch * training.seq_len, mesh.size(), flops, peak)
    incidents, unread = Incidents(config, global_batch, first, active=main_rank), Steps(mesh)
    recompilations = RecompilationWatch()
    outlook = Outlook(config, device, mesh.size(), global_batch, clock, active=main_rank)
    tokenizer = open_tokenizer(config.model.hf_assets_path, training.add_bos) if config.validation.sample_prompts else None
    clock.add_pause("startup", time.perf_counter() - started)
    gc.disable()  # Python would collect at another time on each rank, and the others would wait
    stopping, validated = None, False
    while progress.step < training.steps and not stopping:
        step, sample = progress.step + 1, progress.samples
        last = step == training.steps
        if step % training.gc_freq == 0 or step == first:
            gc.collect(1)

        process.seed_step(training.seed, step, rng_rank(mesh))
        with watch.step(step):
            with clock.phase(step, "reading data"):
                batch = next(batches)
            with clock.phase(step, "forward and backward"):
                own_code.at_step("before_step", step, model, optimizer)
                loss = forward_backward(model, batch, mesh, loss_scale)
            if step == first:
                warn_of_unused(model)
            with clock.phase(step, "optimizer step"):
                norm = update(model, optimizer, schedule.at(step), training.max_norm, loss_scale, loss.labels)
                own_code.at_step("after_step", step, model, optimizer)
            if not last:
                with clock.phase(step, "reading data"):  # while the device works on this step
                    batches.prepare()
        unread.add(step, sample, loss, norm)
        progress = progress._replace(step=step)
        clock.steps += 1
        outlook.step()

        stopping = None if last else stop.agreed()
        validating = validation is not None and (last or step % config.validation.freq == 0)
        reporting = last or stopping or validating or step == first or step % config.metrics.log_freq == 0
        saving = saver is not None and (last or stopping or step % config.checkpoint.interval == 0)
        if reporting or saving:
            with clock.phase(step, "metrics"):  # the only place where the host waits for the device
                steps = unread.read()
                newest = saver.newest() if saver and incidents.are_bad(steps) else None  # waits for an unfinished save
                bad = incidents.judge(steps, newest, loss_scale.scale.item() if loss_scale else None)
            if bad:  # sets later reports aside, removes later checkpoints, and skips the bad samples
                with clock.phase(step, "going back", "rollback"), longer_than_a_step():
                    restored = load()[0]
                    float8.measure_weights(model)
                    rollback = incidents.record_rollback(bad, step, restored.step)
                    clean_up(saves, restored.step)
                    reporter.begin(restored.step + 1)
                    timeline = restored.timeline.after(restored.step, [rollback])
                    progress = restored._replace(timeline=timeline, run=progress.run)  # titanlite 0.2 saved none
                    check_epochs(data, progress.timeline, training.steps)
                    batches.close()
                    batches = batches_from(progress)
                continue
            progress = progress.with_losses(steps, config.metrics.log_freq)
            for keep in kept:  # files that may have been removed
                keep()
            if step > first + 1:
                recompilations.check(step)
        measured: dict[str, float | None] = {}
        if validation and validating:
            with contextlib.nullcontext() if validated else longer_than_a_step():  # the first time compiles
                with clock.phase(step, "validation", "validation"):
                    measured = validate(model, validation, config, mesh, device, ema_of(optimizer))
                if tokenizer:
                    with clock.phase(step, "writing samples", "samples"):
                        reporter.samples(step, sample_texts(model, config, tokenizer))
            validated = True
        if step <= first + 1 or validating:  # graphs of the first step, of warm state, of a pass without gradients
            recompilations.settle()
        if reporting:
            values = {"loss_mean": progress.loss_mean, "loss": steps[-1].loss, "grad_norm": steps[-1].norm}
            values |= {"further_loss": steps[-1].further} if training.predict_further else {}
            values |= {"lr": schedule.at(step), **measured, **expert_load(model, config.parallelism.expert_parallel_degree)}
            values |= {**(loss_scale.report() if loss_scale else {}), **recompilations.report(config.compile)}
            values |= {"tokens_seen": progress.timeline.seen(step) * training.seq_len, **measure_speed(batches.waited())}
            values |= {"peak_memory_gib": largest_peak_gib(device)}
            values |= own_code.values(step, values, model, batch)
            reporter.report(step, values)
            log.info(console_line(step, training.steps, values))
            outlook.report(values, recompilations.recompilations)
            clock.restart()  # so that what reporting took is no training
        if saver and saving:
            with clock.phase(step, "saving", "save"):  # for as long as training waits
                progress = progress._replace(stream=stream_at(batches.state, progress.samples, mesh))
                if saver.save(step, run_tensors(model, optimizer, loss_scale), numbers_of(setting, schedule, progress)):
                    own_code.call("at_save", step, step_folder(saves, step))
        elif saver:
            saver.poll()
        if step == first:
            process.set_timeout(config.comm.train_timeout_seconds, group_of_saver)
    gc.enable()
    if stopping:
        log.info("stopping after step %d: %s%s", progress.step, stopping, "" if saver else "; nothing is saved")
    stop.close()
    if saver:
        with clock.phase(step, "finishing", "save"):
            saver.finish()
        if config.checkpoint.last_save_in_hf and not stopping:
            with clock.phase(step, "exporting", "save"):
                save_in_hf(saves, progress.step, saver, config.model.name)
    for each in (batches, watch, reporter):
        each.close()
    pauses = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.totals.items())
    log.info("done: %d steps in %.1f s, of which %s", step - first + 1, time.perf_counter() - started, pauses)
    return bool(stopping)


def finished_already(config: Config, progress: Progress, saves: Path, saver: Saver | None) -> None:
    """For a run without steps left: logs that, and writes the export if a kill has prevented it."""
    log.info(
        "nothing to do: %s holds step %d of training.steps = %d. Raise training.steps to continue, and where the rate has "
        "ended at 0 also lr_scheduler.total_steps, or give another job.dump_folder to start from step 0",
        saves, progress.step, config.training.steps,
    )  # fmt: skip
    if saver and config.checkpoint.last_save_in_hf:
        save_in_hf(saves, progress.step, saver, config.model.name)


def save_in_hf(saves: Path, step: int, saver: Saver, name: str) -> None:
    """Writes a committed checkpoint's weights in Hugging Face's format beside it, if they are not there; all ranks together."""
    begin, output = time.perf_counter(), export_folder(saves, step)
    if process.of_first_rank(output.exists(), saver.group):
        return
    export(step_folder(saves, step), output, group=saver.group, named=name)
    log.info("exported %s in %.2f s", output, time.perf_counter() - begin)


# ------------------------------------------------------------------------------------------------------------ the program

# All ranks meet most errors. Rank 0 reports at once, and within this many seconds the launcher ends the other ranks; an error
# of another rank alone, or a connection lost to a rank that failed, is reported that much later.
_PATIENCE = 3.0
# Longer where NCCL's flight recorder is writing: gloo, by which the ranks agree on stopping, times out when NCCL does.
_RECORDER_PATIENCE = 10.0


def main(config: Config | None = None) -> None:
    """Trains, and exits: 0 when done, 2 for a UserError, the code of `stacks.report` for any other.

    config: what the launcher has read and checked; without it this process reads its command line and checks.
    """
    started = time.perf_counter()
    process.set_up_logging()
    rank, world = process.rank_and_world()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun or our launcher; another one may be a shell that does not stay
        children.end_with_parent()  # no rank outlives the launcher
    patience, at_error = _PATIENCE, contextlib.ExitStack()
    try:
        if config is None:
            path, config = read_words(sys.argv[1:], "titanlite train CONFIG.toml [--section.key value ...]")
            check(config, path, world, number("LOCAL_WORLD_SIZE", world), open_files=False, more=[memory_plan.CHECK])
        if config.job.print_config and rank == 0:
            print(to_toml(config), flush=True)
        cuda = torch.cuda.is_available()
        if note := effects.note(config.idle(Hardware(cuda, world))):
            log.info("%s", note)
        degrees = resolve_degrees(config.parallelism, world)
        lock = RunLock(*owned_folders(config)) if rank == 0 else None  # until this process ends
        settled = config.settled(Hardware(cuda, world))
        profiling.record_collectives(settled)
        if settled.comm.trace_buf_size:
            patience = _RECORDER_PATIENCE
        family = family_of(config.model)
        sources = source_of(family.module) | source_of_parts(settled, reports=True)
        hashes = {name: module["hash"] for name, module in sources.items()} | {"teacher": digest_of_teacher(settled)}
        device = process.start(config, identity(settled, "cuda" if cuda else "cpu", family.dimensions(), hashes))
        stacks.open_dump(Path(config.job.dump_folder), rank)  # after rank 0 has taken the lock, which start waits for
        data, validation = open_on_every_rank(config, family.config.vocab_size)
        mesh = build_mesh(degrees, device.type)
        stopped = train(config, data, validation, mesh, device, started, lock, at_error)
        dist.destroy_process_group()
        stacks.close_dump()
    except UserError as error:
        stacks.close_dump()
        if number("LOCAL_RANK") > 0:
            time.sleep(_PATIENCE)
        log.error("%s", error)
        code = 2
    except Exception as error:
        code = stacks.report(error, patience)
    else:
        sys.exit(0 if not stopped else EXIT_CODE if config.checkpoint.enable else UNSAVED)
    if code != stacks.ECHO:  # a rank that has lost another one might wait for its save in vain
        try:
            at_error.close()
        except Exception as error:
            stacks.report(error)
    sys.stderr.flush()
    os._exit(code)  # sys.exit would wait for ranks that are in a collective; the launcher ends them
