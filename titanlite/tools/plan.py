"""titanlite plan CONFIG.toml --gpus N --device h100 [--nodes-of 8] [--objective memory] [--top 5] [--output FILE.toml]
    [--trace FILE.json] [--section.key value ...]
titanlite plan --calibrate FILE.toml [--ranks N] [--minutes 2]

Predicts the time of a step on every mesh of N GPUs that the model and the global batch allow, and prints the fastest that fit,
or, with --objective memory, those that hold the least. It chooses the degrees of the mesh, the schedule of a pipeline,
training.local_batch_size, activation_checkpoint.mode and parallelism.fsdp_reshard_after_forward; everything else is the
configuration's. `titanlite check` has accepted each mesh that is printed, and the memory of the first is that of `titanlite
estimate`. Speeds are predictions: the last line says how far they have been from published runs. --output writes the first
mesh as a file whose base is CONFIG.toml, --trace its step as a file for ui.perfetto.dev. --calibrate measures this machine and
writes a file for --device.

Exit code 0 with a mesh, 1 when none fits, 2 for a fault of the configuration.
"""

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from titanlite.config import effects
from titanlite.config.effects import OPTION, ConfigLayer, Hardware
from titanlite.config.read import Faults, read_config, read_words, toml_value
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.launch import children
from titanlite.launch.local_ranks import on_ranks
from titanlite.loop.checks import check
from titanlite.plan.calibrate import calibrate
from titanlite.plan.job import errors_of, job_of
from titanlite.plan.predict import predict
from titanlite.plan.report import GIB
from titanlite.plan.search import CHOSEN, Candidate, candidates, keys_of, name_of, room_of, shares, why
from titanlite.plan.time import Choice, Job
from titanlite.plan.timeline import events
from titanlite.registry.family import family_of
from titanlite.tools.options import LOCAL_RANKS, PREDICTED, Real, WholeNumber, config_parser, help_of, new_file, nonempty

_TRIED = 40  # candidates that `check` sees before the search gives up


def main() -> None:
    parser = config_parser("plan", __doc__, PREDICTED, "--gpus")
    parser.add_argument("--device", type=nonempty, default="h100", help="a name of devices.toml, or a file of --calibrate")
    parser.add_argument("--nodes-of", type=WholeNumber(1, 1024), default=8, help="GPUs that NVLink connects")
    parser.add_argument("--objective", choices=["tokens_per_second", "memory"], default="tokens_per_second")
    parser.add_argument("--top", type=WholeNumber(1, 20), default=5)
    parser.add_argument("--output", type=new_file, metavar="FILE.toml")
    parser.add_argument("--trace", type=new_file, metavar="FILE.json", help="the first mesh's step, for ui.perfetto.dev")
    parser.add_argument("--calibrate", type=new_file, metavar="FILE.toml", help="measure this machine for --device")
    parser.add_argument("--ranks", type=LOCAL_RANKS, help="with --calibrate: processes (default: one for each GPU, or one)")
    parser.add_argument("--minutes", type=Real(0.01, 60), help="with --calibrate: of all measurements together (default: 2)")
    options, words = parser.parse_known_args()
    given = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    if options.calibrate:
        write_device(options.calibrate, options.ranks, options.minutes or 2.0, [*words, *given])
        return
    if useless := [option for option in ("--ranks", "--minutes") if option in given]:
        raise UserError(f"{useless[0]}: has no effect without --calibrate; leave the option out")
    path, config = read_words(words, help_of(parser))
    job = read_job(config, options.device, options.nodes_of)
    job.device.check(options.device, options.gpus, options.nodes_of)
    for option, file in (("--output", options.output), ("--trace", options.trace)):
        if file and file.exists():
            raise UserError(f"{option} {file}: exists; name a new file")
    kept = given_values(config, path) if options.output else {}
    found = candidates(job, options.gpus, options.objective)
    winners, refused, gave_up = sound(found, path, words[1:], job, options.top)
    if not winners:
        reason = f"; the best are refused: {refused[0]}" if refused else ", or none divides the model and the batch"
        tried = f" among those that were tried: gave up after {_TRIED} refusals" if gave_up else ""
        print(f"{config.model.title}: no mesh of {options.gpus} x {options.device} fits{tried}{reason}")
        sys.exit(1)
    idle = chosen_config(path, words[1:], winners[0].choice).idle(Hardware(ranks=options.gpus))
    if note := effects.note(idle):
        print(f"{path}: on the first mesh, {note}", file=sys.stderr)
    if options.output:
        without = {f"{key.section}.{key.name}" for key in idle}  # refused in one file with what switches them off
        write(options.output, path, {key: kept[key] for key in kept if key not in without} | keys_of(winners[0].choice))
    if options.trace:
        trace = {"traceEvents": events(job, winners[0].choice), "displayTimeUnit": "ms"}
        options.trace.write_text(json.dumps(trace), encoding="utf-8")
    print("\n".join(lines(winners, config, job, options.gpus, options.device, refused, gave_up)))


def write_device(path: Path, ranks: int | None, minutes: float, words: list[str]) -> None:
    """Measures this machine, and writes the file. words: the rest of the command line, and all options."""
    if extra := [word for word in words if word not in ("--calibrate", "--ranks", "--minutes")]:
        raise UserError(f"{extra[0]}: has no effect with --calibrate, which measures the machine alone; leave it out")
    if path.suffix != ".toml" or path.exists():
        raise UserError(f"--calibrate {path}: {'exists' if path.exists() else 'must end in .toml'}; name a new FILE.toml")
    gpus = torch.cuda.device_count()
    if ranks and 0 < gpus < ranks:
        raise UserError(f"--ranks {ranks}: this machine has {gpus} GPUs, and each rank needs one")
    text: str = on_ranks(ranks or max(1, gpus), calibrate, minutes * 60)
    path.write_text(text, encoding="utf-8")
    print(f"{text}\n{path}: for titanlite plan CONFIG.toml --gpus N --device {path}")


def read_job(config: Config, device: str, node: int) -> Job:
    """Raises UserError for a configuration that `plan` cannot predict."""
    if chosen := [key for key in CHOSEN if config.layers.get(key) == OPTION]:
        raise UserError(f"--{chosen[0]}: plan chooses it; leave the option out")
    if config.training.global_batch_size < 0:
        raise UserError("training.global_batch_size: must be given, since a plan compares meshes with the same batch")
    return job_of(config, device, node, config.training.global_batch_size)


def chosen_config(path: str, words: list[str], choice: Choice) -> Config:
    """The configuration with a choice, for which keys without effect are refused as little in options as in the file."""
    keys = keys_of(choice)
    config = read_config(path, [*words, *(word for key, value in keys.items() for word in (f"--{key}", str(value)))])
    config.layers.update(dict.fromkeys(keys, ConfigLayer(OPTION.number + 1)))
    return config


def sound(found: list[Candidate], path: str, words: list[str], job: Job, top: int) -> tuple[list[Candidate], list[str], bool]:
    """(the first candidate of each of the first meshes that `check` accepts, of which the first fits by `estimate`; why others
    are refused; whether it gave up).

    Raises Faults for those of the configuration, which no choice changes.
    """
    winners: list[Candidate] = []
    refused: list[str] = []
    on_cpu = job.device.cpu_ranks > 0
    # values of a choice, such as one degree, and the memory of which more is not tried with them; -inf: nothing is
    tried: list[tuple[dict[str, Any], float]] = []

    def checked(choice: Choice) -> Config:
        config = chosen_config(path, words, choice)
        check(config, path, choice.ranks, open_files=False, elsewhere=not on_cpu)
        return config

    for candidate in found:
        choice = candidate.choice
        given = choice._asdict()
        if any(candidate.memory > most and values.items() <= given.items() for values, most in tried):
            continue
        mesh = {name: given[name] for name in Choice._fields[:6]}
        if len(refused) == _TRIED:
            return winners, refused, True
        try:
            config = checked(choice)
        except Faults as faults:
            refused.append(f"{name_of(choice)}: {faults.faults[0]}")
            named = named_by(faults.faults[0], choice)
            recompute = {"recompute": choice.recompute}
            values = next((each for each in (named, named | recompute) if faults.faults[0] in faults_of(checked, each)), None)
            if values == {}:
                on_any = faults_of(checked, {})
                raise Faults(path, [each for each in faults.faults if each in on_any]) from None
            tried.append((values or mesh | recompute, -math.inf))
            continue
        measured = None
        if not winners and not BEFORE_2_13:  # which cannot predict with bfloat16
            measured = predicted(config, choice.ranks, "cpu" if on_cpu else "cuda")
            if measured > room_of(job):
                refused.append(f"{name_of(choice)}: takes {measured / GIB:.0f} GiB by titanlite estimate")
                tried.append((mesh, candidate.memory * room_of(job) / measured))
                continue
        winners.append(candidate._replace(measured=measured))
        tried.append((mesh, -math.inf))
        if len(winners) == top:
            break
    return winners, refused, False


def named_by(fault: str, choice: Choice) -> dict[str, Any]:
    """The fields of a choice whose keys a fault names, with their values."""
    named = [field for key, field in CHOSEN.items() if re.search(rf"\b{key.partition('.')[2]}\b", str(fault))]
    return {field: getattr(choice, field) for field in named}


def faults_of(checked: Callable[[Choice], Config], values: dict[str, Any]) -> list[str]:
    """The faults of the smallest mesh that has these values of a choice."""
    alone = Choice(**values)
    try:
        checked(alone._replace(dp_shard=max(alone.dp_shard, alone.ep // (alone.cp * alone.tp))))
    except Faults as faults:
        return faults.faults
    return []


def predicted(config: Config, ranks: int, device_type: str) -> int:
    """Bytes by `predict`, in a process of its own: DTensor's caches name the process groups of a mesh that is gone."""
    spawn, end = get_context("spawn"), children.end_with_parent
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=end, initargs=(os.getpid(),)) as pool:
        with children.starting({signal.SIGINT}):
            running = pool.submit(predict, config, ranks, device_type)
        return running.result().memory.total


def lines(
    winners: list[Candidate], config: Config, job: Job, gpus: int, device: str, refused: list[str], gave_up: bool
) -> list[str]:
    first = winners[0]
    rate = [job.global_batch * job.seq_len / each.seconds.total / gpus for each in winners]
    flops = family_of(config.model).module.flops(family_of(config.model).config, job.seq_len)
    mfu = flops.palm * rate[0] / job.peak
    found = [f"{config.model.title} on {gpus} x {device}: seconds of a step, tokens per second and GPU, GiB of a rank"]
    for number, (candidate, speed) in enumerate(zip(winners, rate, strict=True), 1):
        size = f"{candidate.measured / GIB:.0f}" if candidate.measured else f"about {candidate.memory / GIB:.0f}"
        numbers = f"{candidate.seconds.total:8.2f} s {speed:9,.0f} {size:>9} GiB"
        found.append(f"  {number}. {numbers}  {name_of(candidate.choice)}: {why(candidate)}")
    words = " ".join(f"--{key} {value}" for key, value in keys_of(first.choice).items())
    found += [f"  the first: {words}", f"  MFU {mfu:.1%} (attention counted the PaLM way); a step spends"]
    found += [f"    {share}" for share in shares(first.seconds)]
    if refused:
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        more += "; plan gave up after these" if gave_up else ""
        found.append(f"  better candidates are refused, or do not fit by titanlite estimate: {refused[0]}{more}")
    return [*found, f"  {_expected(job, device)}"]


def _expected(job: Job, device: str) -> str:
    """How far such predictions have been from published runs that nothing was fitted to."""
    kind = job.shape.kind
    if (error := errors_of(job, device)) is None:
        return f"error: unknown, since no blind published run is of a {kind} model on {device}"
    return f"error: {error[0]:.0%} on average, {error[1]:.0%} in the ninth decile, of published {kind} runs on {device}"


def given_values(config: Config, base: str) -> dict[str, Any]:
    """What the options of the command line set. Raises UserError for "none": TOML has no null that unsets a key of `base`."""
    values, keys = config.model_dump(), [key for key, layer in config.layers.items() if layer == OPTION]
    given = {key: values[section][name] for key in keys for section, name in [key.split(".")]}
    if unset := [key for key, value in given.items() if value is None]:
        remedy = f"remove the key from a copy of {base}, or leave --output out"
        raise UserError(f"--{unset[0]}: none cannot be written into a file that has {base} as its base; {remedy}")
    return given


def write(output: Path, base: str, keys: dict[str, Any]) -> None:
    """A configuration that differs from `base` in these keys."""
    # the file is opened from where it really is; base itself may be a link, beside which its own base is
    real = os.path.join(os.path.realpath(os.path.dirname(base)), os.path.basename(base))
    text = [f"base = {toml_value(os.path.relpath(real, os.path.realpath(output.absolute().parent)))}"]
    for section in dict.fromkeys(key.partition(".")[0] for key in keys):
        text += ["", f"[{section}]"]
        for key, value in keys.items():
            where, _, name = key.partition(".")
            if where == section:
                text.append(f"{name} = {toml_value(value)}")
    output.write_text("\n".join(text) + "\n", encoding="utf-8")
