"""The training loop, top to bottom; the only file that knows all the others.

TOML -> Config -> mesh -> model on meta -> sharded -> materialised and initialised -> optimizer -> checkpoint restored ->
the loop {global batch -> loss -> backward -> clip -> step -> report -> checkpoint}.

    torchrun ... -m titanlite train CONFIG.toml [--section.key value ...]     (run_train.sh does this)
"""

import gc
import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.folder import clean_up, export_folder, step_folder, try_out
from titanlite.checkpoint.save import Saver
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.data.batches import OnDevice, read_batches
from titanlite.data.mixture import Data, check_epochs, open_data
from titanlite.data.sources import open_tokenizer
from titanlite.errors import UserError
from titanlite.hf.export import export
from titanlite.inference.generate import Sampling, continue_texts
from titanlite.launch import children, process, stacks
from titanlite.launch.run_folder import lock_run, record_start
from titanlite.launch.stop import EXIT_CODE, UNSAVED, Stop
from titanlite.loop import profiling
from titanlite.loop.checks import check
from titanlite.loop.divergence import Incidents, Steps, finite
from titanlite.loop.metrics import Clock, Reporter, console_line, peak_flops, peak_memory_gib, speed
from titanlite.loop.resume import Progress, numbers_of, restore
from titanlite.loop.step import build_model, forward_backward, update, warn_of_unused
from titanlite.loop.summary import derived_values
from titanlite.loop.validation import validate
from titanlite.optim.build import build_optimizer
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.state import create_state, run_tensors
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, resolve_degrees
from titanlite.transforms import float8
from titanlite.transforms.compile import RecompilationWatch
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import training_flops
from titanlite.transforms.registry import family_of

log = logging.getLogger("titanlite")

# Most faults are met by all ranks alike. Rank 0 tells of them, and within this many seconds the launcher ends the others;
# what only another rank has met is told by that rank, later by so much. So is a connection lost to a rank that failed.
_PATIENCE = 3.0
# Where NCCL's flight recorder writes meanwhile: gloo, which the ranks agree on stopping with, loses patience when NCCL does.
_RECORDER_PATIENCE = 10.0


# -------------------------------------------------------------------------------------------------------------- the loop


def train(
    config: Config,
    data: Data,
    validation: Data | None,
    mesh: DeviceMesh,
    device: torch.device,
    started: float,
) -> bool:
    """Trains from the newest checkpoint, or the beginning, to `training.steps`; -> whether it was stopped before that.

    validation: the data of [validation], or None where that is not enabled.
    started: time.perf_counter() of the program's start, for the report of how long it took to begin.
    Raises UserError when a loss or gradient stops being finite.
    """
    training, folder = config.training, Path(config.job.dump_folder)
    saves = folder / config.checkpoint.folder
    main_rank = torch.distributed.get_rank() == 0
    if not process.same_everywhere(data.fingerprint + (validation.fingerprint if validation else "")):
        raise UserError("the ranks read different data: give all nodes the same files and Python version")
    if validation is not None and validation.fingerprint == data.fingerprint:
        log.info("validation reads the text that is trained on; [validation] dataset_path names another")
    family = family_of(config.model)
    global_batch = config.global_batch(data_degree(mesh))
    step_tokens = global_batch * training.seq_len

    saver = None
    if config.checkpoint.enable:
        try_out(saves)
        saver = Saver(saves, config.checkpoint, config.comm.save_timeout_seconds)
    stop = Stop(config.job.time_limit_minutes)
    # The mesh's groups and that of `stop` were made with PyTorch's patience: half an hour, on NCCL ten minutes.
    process.set_timeout(config.comm.init_timeout_seconds, but=saver and saver.group)
    stacks.at(0, "building the model")
    model = build_model(family, config, mesh, device)
    flops, peak = training_flops(family, config, model), peak_flops(device, training.mixed_precision_param)
    optimizer = build_optimizer(model, config.optimizer, DTYPES[training.mixed_precision_param])
    create_state(optimizer)
    loss_scale = LossScale(device) if training.mixed_precision_param == "float16" else None
    scale = loss_scale and loss_scale.scale
    stacks.at(0, "loading the checkpoint")
    progress, schedule = restore(config, family, data, global_batch, model, optimizer, loss_scale, saves)
    facts = derived_values(config, family, data, mesh, model, schedule, progress)
    for name, value in facts.items():
        log.info("%-20s %s", name, value)
    if progress.step >= training.steps:
        log.info(
            "nothing to do: %s holds step %d of training.steps = %d. Raise training.steps to go on, or give another "
            "job.dump_folder to start anew",
            saves, progress.step, training.steps,
        )  # fmt: skip
        if saver and config.checkpoint.last_save_in_hf:
            save_in_hf(saves, progress.step, saver)  # if it was killed before that
        return False
    if saver:
        clean_up(saves, progress.step)
    if main_rank:
        record_start(
            folder,
            config,
            Path(family.module.__file__ or ""),
            {
                "values": facts,
                "global_batch": global_batch,
                "data": data.describe(),
                "resumed_step": progress.step,
            },
        )
    first = progress.step + 1
    tensorboard = config.metrics.save_tb_folder if config.metrics.enable_tensorboard else None
    reporter = Reporter(folder, tensorboard, first, active=main_rank)
    incidents, unread = Incidents(config, global_batch, first, active=main_rank), Steps(mesh)
    part = (data_rank(mesh), data_degree(mesh))
    seat = part[0] * mesh["tp"].size() + mesh["tp"].get_local_rank()  # no two ranks see the same activations

    def batches_from(samples: int) -> OnDevice:
        return OnDevice(read_batches(config, data, samples, global_batch, part, pin_memory=device.type == "cuda"), device)

    source = batches_from(progress.samples)
    prompts = config.validation.sample_prompts
    tokenizer = open_tokenizer(config.model.hf_assets_path) if prompts else None

    clock, steps_timed = Clock(), 0
    clock.started = started
    clock.add_pause("startup", time.perf_counter() - started)
    watch = profiling.Watch(config, device, model, optimizer, global_batch, clock)
    recompilations = RecompilationWatch()
    gc.disable()  # collections at a time of each rank's own choosing make all others wait
    stopping = None
    while progress.step < training.steps and not stopping:
        step, sample = progress.step + 1, progress.samples
        last = step == training.steps
        if step % training.gc_freq == 0 or step == first:
            gc.collect(1)

        process.seed_step(training.seed, step, seat)
        with watch.step(step):
            stacks.at(step, "reading data")
            with clock.waiting_for_data():
                batch = source.take()
            stacks.at(step, "forward and backward")
            share = forward_backward(model, batch, mesh, scale, config.parallelism.reduce_every_microbatch)
            if step == first:
                warn_of_unused(model)
            stacks.at(step, "optimizer step")
            norm = update(model, optimizer, schedule.at(step), training.max_norm, loss_scale)
            if not last:  # the device works on this step meanwhile
                stacks.at(step, "reading data")
                with clock.waiting_for_data():
                    source.prepare()
        unread.add(step, sample, share, norm)
        progress = Progress(step, sample + global_batch)
        steps_timed += 1

        stacks.at(step, "metrics")
        stopping = None if last else stop.agreed()
        validating = validation is not None and (last or step % config.validation.freq == 0)
        reporting = last or stopping or validating or step == first or step % config.metrics.log_freq == 0
        saving = saver is not None and (last or stopping or step % config.checkpoint.interval == 0)
        if reporting or saving:  # the only places where the host waits for the device
            found = unread.read()
            newest = saver.newest() if saver and incidents.are_bad(found) else None  # a save that goes on is waited for
            if rollback := incidents.judge(found, newest):
                stacks.at(step, "going back")
                process.set_timeout(config.comm.init_timeout_seconds, but=saver and saver.group)  # loading takes longer
                with clock.pause("rollback"):
                    progress, _ = restore(config, family, data, global_batch, model, optimizer, loss_scale, saves)
                    float8.measure_weights(model)
                    incidents.went_back(rollback, progress.step)
                    progress = Progress(progress.step, rollback.next_sample)
                    clean_up(saves, progress.step)
                    reporter.go_back(progress.step)
                    source.close()
                    source = batches_from(progress.samples)
                process.set_timeout(config.comm.train_timeout_seconds, but=saver and saver.group)
                clock.restart()
                steps_timed = 0
                continue
        measured: dict[str, float] = {}
        if validating:
            stacks.at(step, "validation")
            with clock.pause("validation"):
                measured = validate(model, validation, config, mesh, device)
            if tokenizer:
                stacks.at(step, "writing samples")
                with clock.pause("samples"):
                    tokens, size = config.validation.sample_tokens, family.config.vocab_size
                    drawn = Sampling(seed=training.seed)
                    texts = continue_texts(model, size, tokenizer, prompts, tokens, drawn, mesh["tp"].size())
                    reporter.samples(step, texts)
        if reporting:
            loss, grad_norm = finite(found[-1].loss), finite(found[-1].norm)  # JSON has no infinity
            values = {"loss": loss, "grad_norm": grad_norm, "lr": schedule.at(step), **measured}
            if loss_scale is not None:
                values |= loss_scale.report()
            if config.compile.enable:
                values |= {"recompilations": recompilations.recompilations}
            values |= {"tokens_seen": progress.samples * training.seq_len}
            values |= speed(clock, steps_timed * step_tokens, mesh.size(), flops, peak)
            values |= {"peak_memory_gib": peak_memory_gib(device)}
            reporter.report(step, values)
            log.info(console_line(step, training.steps, values))
            clock.restart()
            steps_timed = 0
        if saver and saving:
            stacks.at(step, "saving")
            with clock.pause("save"):  # as long as training waits
                numbers = numbers_of(config, family, data, schedule, progress, global_batch)
                saver.save(step, run_tensors(model, optimizer, loss_scale), numbers)
        elif saver:
            saver.poll()
        if step == first:
            process.set_timeout(config.comm.train_timeout_seconds, but=saver and saver.group)
        if step <= first + 1 or validating:  # the first step, the second with its warm state, and the pass without gradients
            recompilations.settle()
        elif reporting:
            recompilations.check(step)
    gc.enable()
    if stopping:
        log.info("stopping after step %d: %s%s", progress.step, stopping, "" if saver else "; nothing is saved")
    stacks.at(step, "finishing")
    stop.close()
    if saver:
        with clock.pause("save"):
            saver.finish()
            if config.checkpoint.last_save_in_hf and not stopping:
                stacks.at(step, "exporting")
                save_in_hf(saves, progress.step, saver)
    source.close()
    watch.close()
    reporter.close()
    pauses = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.totals.items())
    log.info("done: %d steps in %.1f s, of which %s", step - first + 1, time.perf_counter() - started, pauses)
    return bool(stopping)


def save_in_hf(saves: Path, step: int, saver: Saver) -> None:
    """Writes a committed checkpoint's weights in Hugging Face's format beside it, if they are not there; all ranks together."""
    begin, output = time.perf_counter(), export_folder(saves, step)
    there = [output.exists()]
    torch.distributed.broadcast_object_list(there, group=saver.group)
    if there[0]:
        return
    export(step_folder(saves, step), output, group=saver.group)
    log.info("exported %s in %.2f s", output, time.perf_counter() - begin)


# ------------------------------------------------------------------------------------------------------------ the program


def main() -> None:
    """Reads the command line, trains, and exits: 0 when done, 2 for a fault of the user's, 1 for any other."""
    started = time.perf_counter()
    process.set_up_logging()
    rank, world = process.rank_and_world()
    if "RANK" in os.environ:
        children.end_with_parent()  # no rank trains on without the launcher
    patience = _PATIENCE
    try:
        path, options = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
        if not path or path.startswith("-"):
            raise UserError("give a configuration first: run_train.sh train_configs/llama_debug.toml [--section.key value]")
        config = read_config(path, options)
        check(config, path, world)
        data = open_data(config)
        validation = open_data(config, "validation") if config.validation.enable else None
        degrees = resolve_degrees(config.parallelism, world)
        check_epochs(data, config.training.steps * config.global_batch(degrees["dp_replicate"] * degrees["dp_shard"]))
        held = lock_run(Path(config.job.dump_folder)) if rank == 0 else None
        profiling.record_collectives(config)
        if torch.cuda.is_available() and config.comm.trace_buf_size:
            patience = _RECORDER_PATIENCE
        device = process.start(config)
        stacks.open_dump(Path(config.job.dump_folder), rank)  # not before rank 0 holds the lock, which start waits for
        mesh = build_mesh(degrees, device.type)
        stopped = train(config, data, validation, mesh, device, started)
        process.finish()
        stacks.close_dump()
        if held:
            held.close()
    except UserError as error:
        stacks.close_dump()
        if rank > 0:
            time.sleep(_PATIENCE)
        log.error("%s", error)
        sys.stderr.flush()
        os._exit(2)  # not sys.exit: the other ranks may be waiting in a collective, and the launcher ends them
    except Exception as error:
        stacks.report(error, patience if process.is_echo(error) else 0.0)
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0 if not stopped else EXIT_CODE if config.checkpoint.enable else UNSAVED)
