"""titanlite compared with its peers, in one run: python -m benchmarks.throughput --help

All contestants train the same Llama, each in its own process: the same initial weights, batches, precision, optimizer and
number of threads. Their first losses are compared, and a contestant whose losses differ is refused: it computes something
else. Then they take turns of some steps, A B C A B C ...; times are medians over the rounds, and ratios are medians of the
ratio inside a round, so a machine whose speed drifts gives the same ratios. benchmarks/README.md describes each measurement.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.allocators import ALLOCATORS, environment
from benchmarks.contestants import CONTESTANTS, MATMUL, Contestant
from benchmarks.contestants.job import CONFIG, Job, Unfit
from benchmarks.contestants.matmul import flops as matmul_flops
from benchmarks.contestants.titanlite import config_of
from benchmarks.figures import OURS, aligned, disagreements, least_bytes, table
from benchmarks.processes import ROOT, Left, Process, base_environment, missing_packages, python_of
from models import llama3
from titanlite.ground.errors import UserError
from titanlite.plan.time import peak_flops_of
from titanlite.registry.family import Family

# The largest relative difference between the first losses of two contestants. In float32 only the order of sums differs. In
# bfloat16 every matmul rounds to 3 digits, and contestants differ in what else they store in bfloat16: autocast keeps the
# residual path in float32, titanlite does not.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "bfloat16-pure": 2e-3}


PEERS = "plain,plain-compiled,hf,torchtitan,litgpt,fabric"  # of --peers


class Fault(Exception):
    """A fault that the user can fix; the message says how."""


# ------------------------------------------------------------------------------------------------------- the command line


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--peers",
        help=f"contestants beside titanlite, of {', '.join(CONTESTANTS)}; those that are not installed are left out; "
        f"default: {PEERS}, on CUDA without those that its memory cannot hold",
    )
    add(
        "--model",
        default="llama3:debug",
        help="llama3:FLAVOR, followed by dimensions that differ: llama3:debug,n_layers=8,dim=512",
    )
    add("--vocab", type=int, help="size of the vocabulary; default: the flavor's")
    add("--precision", choices=list(TOLERANCE), default="bfloat16")
    add("--batch", type=int, default=8, help="sequences in one forward and backward pass")
    add("--seq", type=int, default=256, help="tokens in one sequence")
    add("--accumulate", type=int, default=1, help="passes in one optimizer step")
    add("--recompute", choices=["none", "full"], default="none", help="recompute the blocks' activations in the backward pass")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads of each contestant; its ranks share them")
    add("--ranks", type=int, default=1, help="processes of every titanlite contestant, with FSDP2 between them")
    add(
        "--titanlite", default="", metavar="OPTIONS", help='options of titanlite\'s configuration: "--compile.components model"'
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar='NAME="OPTIONS"',
        help="another titanlite contestant: its options override those of --titanlite, --ranks N included; repeatable",
    )
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=10, help="steps of each contestant in each round")
    add("--warmup", type=int, default=2, help="untimed steps of each process before its first turn")
    add("--check-steps", type=int, default=5, help="first steps whose losses must agree")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=0)
    add("--no-warm", action="store_true", help="skip the second start, with a warm compiler cache")
    add(
        "--one-at-a-time",
        action=argparse.BooleanOptionalAction,
        help="a new process for each turn; default: on CUDA, where two may not fit",
    )
    add(
        "--allocator",
        choices=list(ALLOCATORS),
        help="allocator of every contestant, from benchmarks/allocators.py; default: on CUDA expandable, on a CPU default",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the environment of every contestant; repeatable",
    )
    add(
        "--python",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="interpreter of a peer that needs its own environment; repeatable",
    )
    add("--output", type=Path, metavar="FILE.json", help="where to write all raw results, for python -m benchmarks.report")
    args = parser.parse_args(words)
    for name in ("batch", "seq", "accumulate", "threads", "ranks", "rounds", "steps", "check_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    args.allocator = args.allocator or {"cpu": "default", "cuda": "expandable"}[args.device]
    return args


def pairs(given: list[str], option: str) -> dict[str, str]:
    """NAME=VALUE words as a dictionary."""
    if wrong := [word for word in given if "=" not in word]:
        raise Fault(f"{option} {wrong[0]}: must read NAME=VALUE")
    return dict(word.split("=", 1) for word in given)


def dimensions(model: str, vocab: int | None) -> llama3.Config:
    """--model and --vocab as the family's own Config."""
    flavor, *changes = model.split(",")
    family, _, name = flavor.partition(":")
    if family != "llama3" or name not in llama3.FLAVORS:
        raise Fault(f"--model {flavor}: must be llama3:FLAVOR, of {', '.join(llama3.FLAVORS)}, followed by dimensions")
    base = llama3.FLAVORS[name]
    whole = {field.name for field in fields(base) if isinstance(getattr(base, field.name), int)} - {"tied_embeddings"}
    found = {"vocab_size": vocab or base.vocab_size}
    for key, value in pairs(changes, "--model").items():
        if key not in whole or not value.isdecimal():
            raise Fault(f"--model {key}={value}: must be one of {', '.join(sorted(whole))} and a whole number")
        found[key] = int(value)
    return replace(base, **found)


def line_up(args: argparse.Namespace, config: llama3.Config) -> tuple[dict[str, tuple[Contestant, int]], dict[str, str]]:
    """{name: contestant and its number of ranks}; and those left out, {name: reason}."""
    peers = PEERS if args.peers is None else args.peers
    chosen = [OURS, *(name for name in peers.split(",") if name not in ("", OURS))]
    if unknown := [name for name in chosen if name not in CONTESTANTS]:
        raise Fault(f"--peers {unknown[0]}: there are {', '.join(CONTESTANTS)}")
    pythons, found, left_out = pairs(args.python, "--python"), {}, {}
    common = shlex.split(args.titanlite)
    for name in dict.fromkeys(chosen):
        contestant = CONTESTANTS[name]
        if missing := missing_packages(python_of(contestant.module, pythons), contestant.packages):
            left_out[name] = f"not installed: {', '.join(missing)}"
            continue
        ours = contestant.module == "titanlite"
        if args.peers is None and args.device == "cuda" and not ours:
            facts = args.precision, args.batch * args.seq, args.recompute == "full", contestant.float32_logits
            least, there = least_bytes(config, *facts), torch.cuda.get_device_properties(0).total_memory
            if least > there:
                left_out[name] = f"needs {least / 1e9:.0f} GB or more, of {there / 1e9:.0f}; --peers {name} tries it"
                continue
        if ours:
            contestant = contestant._replace(keys=contestant.keys | {"options": common})
        found[name] = contestant, args.ranks if ours and not contestant.keys.get("fsdp") else 1
    for name, options in pairs(args.variant, "--variant").items():
        split = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        split.add_argument("--ranks", type=int, default=args.ranks)
        own, words = split.parse_known_args(shlex.split(options))
        if own.ranks < 1:
            raise Fault(f"--variant {name}: --ranks {own.ranks}: must be at least 1")
        variant = CONTESTANTS[OURS]._replace(keys={"options": [*common, *words]})
        found[f"{OURS}:{name}"] = variant, own.ranks
    return found, left_out


# --------------------------------------------------------------------------------------------------------------- the work


def write_config(folder: Path, config: llama3.Config, dtype: torch.dtype) -> None:
    """Writes the dimensions in Hugging Face's format."""
    description = llama3.to_hf(config) | {"torch_dtype": str(dtype).removeprefix("torch."), "max_position_embeddings": 131_072}
    (folder / CONFIG).write_text(json.dumps(description, indent=2), encoding="utf-8")


def parameters_of(config: llama3.Config) -> int:
    """The number of parameters."""
    return sum(tensor.numel() for tensor in Family(llama3, config).on_meta().parameters())


def training_flops(config: llama3.Config, seq: int) -> dict[str, float]:
    """FLOPs per token: causal and PaLM, as the family counts them, and those of the blocks' forward pass, for recomputation."""
    found = llama3.flops(config, seq)
    return {
        "causal": found.causal,
        "palm": found.palm,
        "blocks_forward": (found.causal - 6 * config.dim * config.vocab_size) / 3,
    }


class Session:
    """All contestants of one run, and their measurements so far."""

    def __init__(self, args: argparse.Namespace, folder: Path, job: Job, chosen: dict[str, tuple[Contestant, int]]):
        self.args = args
        self.pythons = pairs(args.python, "--python")
        self.allocator = environment(args.allocator)
        self.environment = base_environment(self.allocator, pairs(args.env, "--env"))
        self.apart = args.device == "cuda" if args.one_at_a_time is None else args.one_at_a_time
        self.jobs = {name: self._job(job, contestant, ranks) for name, (contestant, ranks) in chosen.items()}
        self.matmul = self._job(job, MATMUL, 1)
        self.folder = folder
        self.kept: dict[str, Process] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.products: list[float] = []
        self.failed: dict[str, str] = {}
        self.unfit: dict[str, str] = {}

    def _job(self, job: Job, contestant: Contestant, ranks: int) -> Job:
        threads = max(1, job.threads // ranks)
        return replace(
            job, module=contestant.module, compiled=contestant.compiled, keys=contestant.keys, ranks=ranks, threads=threads
        )

    def close(self) -> None:
        for process in self.kept.values():
            process.close()

    def start(self, name: str) -> Process:
        """A new process of a contestant, after its first step."""
        job = self.matmul if name == "matmul" else self.jobs[name]
        return Process(
            job, python_of(job.module, self.pythons), self.environment, self.folder / "caches" / name.replace(":", "-")
        )

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[Process]:
        """A contestant's process during its turn: the kept one, or a new one after its warm-up."""
        if name in self.kept:
            yield self.kept[name]
            self.kept[name].pause()
            return
        process = self.start(name)
        try:
            if name in self.found:
                self.found[name]["first_step"]["warm"].append(process.first_step)
            if self.args.warmup:
                process.run(1, self.args.warmup)
            yield process
        finally:
            if self.apart:
                process.close()
            else:
                process.pause()
                self.kept[name] = process

    def enter(self, name: str) -> None:
        """Starts a contestant cold and warm, and records its first losses; one that cannot start is left out with a message."""
        try:
            process = self.start(name)
            cold, warm = process.first_step, []
            if not self.args.no_warm:
                process.close()
                process = self.start(name)
                warm.append(process.first_step)
            try:
                losses = process.first["losses"]
                if self.args.check_steps > 1:
                    losses = losses + process.run(1, self.args.check_steps - 1)["losses"]
                if self.args.warmup and not self.apart:
                    process.run(self.args.check_steps, self.args.warmup)
            except BaseException:
                process.close()
                raise
            self.found[name] = {
                "module": process.job.module,
                "ranks": process.job.ranks,
                "threads": process.job.threads,
                "compiled": process.job.compiled,
                "keys": process.job.keys,
                "versions": process.imported["versions"],
                "recomputed": process.built["recomputed"],
                "first_step": {"cold": cold, "warm": warm},
                "memory": {"import": process.imported["memory"], "build": process.built["memory"]},
                "losses": losses,
                "seconds": [],
                "cpu_seconds": [],
            }
            if self.apart:
                process.close()
            else:
                process.pause()
                self.kept[name] = process
        except Left as left:
            (self.failed if left.failed else self.unfit)[name] = left.summary
            say(f"{name}: {'failed' if left.failed else 'left out'}: {left}")
            return
        starts = f"first step cold {cold:.1f} s{''.join(f', warm {seconds:.1f} s' for seconds in warm)}"
        say(f"{name}: {starts}, losses {', '.join(f'{loss:.5f}' for loss in losses)}")

    def put_aside(self, name: str, reason: str) -> None:
        """Removes a contestant from the run."""
        say(f"{name}: refused: {reason}")
        self.failed[name] = reason
        self.found.pop(name)
        if name in self.kept:
            self.kept.pop(name).close()

    def take_turns(self) -> int:
        """All rounds, or those completed before Ctrl-C or SIGTERM; -> their number."""
        for number in range(self.args.rounds):
            try:
                self.round(number)
            except KeyboardInterrupt:
                if number == 0:
                    raise
                say(f"interrupted: the results below are of {number} of {self.args.rounds} rounds")
                of_turns = [found[kind] for found in self.found.values() for kind in ("seconds", "cpu_seconds")]
                for seconds in [self.products, *of_turns]:
                    del seconds[number:]
                return number
        return self.args.rounds

    def round(self, number: int) -> None:
        """One turn for each contestant, including the matmul."""
        first, steps = 1000 + number * self.args.steps, self.args.steps
        for name in ["matmul", *self.found]:
            try:
                with self.turn(name) as process:
                    answer = process.run(first, steps)
            except Left as left:
                if name in ("matmul", OURS):
                    raise
                say(f"{name}: {left}")
                self.put_aside(name, left.summary)
                continue
            if name == "matmul":
                self.products.append(answer["seconds"])
                continue
            found = self.found[name]
            found["seconds"].append(answer["seconds"])
            found["cpu_seconds"].append(answer["cpu_seconds"])
            before = found["memory"].get("peak", {})
            found["memory"]["peak"] = {kind: max(size, before.get(kind, 0)) for kind, size in answer["memory"].items()}
        speeds = {name: self.jobs[name].step_tokens() * steps / found["seconds"][-1] for name, found in self.found.items()}
        say(f"round {number + 1}/{self.args.rounds}: " + ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()))


def measure(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """The whole run -> its result. Raises Fault."""
    config = dimensions(args.model, args.vocab)
    chosen, left_out = line_up(args, config)
    for name, reason in left_out.items():
        say(f"{name}: left out: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="throughput-"))
    try:
        taken = {
            name: getattr(args, name)
            for name in ("device", "precision", "batch", "seq", "accumulate", "threads", "recompute", "lr", "seed")
        }
        job = Job(module="", folder=str(folder), **taken)
        write_config(folder, config, job.dtype)
        session = Session(args, folder, job, chosen)
        for titanlite in [job for job in session.jobs.values() if job.module == "titanlite"]:
            config_of(titanlite)  # reports wrong options before any process starts
        try:
            for name in chosen:
                session.enter(name)
            if OURS not in session.found:
                raise Fault(f"{OURS}: {(session.failed | session.unfit)[OURS]}")
            losses = {name: found["losses"] for name, found in session.found.items()}
            reference, others = disagreements(losses, TOLERANCE[args.precision])
            if OURS in others:
                raise Fault(f"{OURS} computes something else than {reference}: {others[OURS]}")
            for name, sentence in others.items():
                session.put_aside(name, sentence)
            within = f"those of {reference} within {TOLERANCE[args.precision]:g}"
            say(f"the losses of the first {args.check_steps} steps agree with {within}")
            rounds = session.take_turns()
        finally:
            session.close()
    finally:
        shutil.rmtree(folder)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(words),
        **commit(),
        "hardware": hardware(args.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "environment": {"allocator": args.allocator, "variables": session.allocator | pairs(args.env, "--env")},
        "job": taken | {"model": asdict(config), "parameters": parameters_of(config)},
        "tolerance": TOLERANCE[args.precision],
        "one_at_a_time": session.apart,
        "rounds": rounds,
        "steps": args.steps,
        "flops": training_flops(config, args.seq),
        "datasheet_flops": peak_flops_of(torch.cuda.get_device_name())
        if args.device == "cuda" and args.precision != "float32"
        else None,
        "matmul": {"flops": matmul_flops(args.device), "seconds": session.products},
        "contestants": session.found,
        "left_out": left_out | session.unfit,
        "failed": session.failed,
    }


def command(words: list[str]) -> str:
    """The command line, without paths of this machine."""
    text = shlex.join(["python", "-m", "benchmarks.throughput", *words])
    text = re.sub(r" --output[= ]\S+", "", text)
    return re.sub(r"(--python[= ][^=\s]+=)\S*/", r"\1", text)


def commit() -> dict[str, Any]:
    """The current commit, and whether there are uncommitted changes; None outside of a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def hardware(device: str) -> dict[str, Any]:
    """CPU with the instructions that PyTorch uses, cores and memory, and the GPU if it is used."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name, instructions = names[0] if names else platform.processor(), torch.backends.cpu.get_cpu_capability()
    found: dict[str, Any] = {"cpu": f"{name} ({instructions})", "cores": os.cpu_count()}
    found["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    args = parse(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = measure(args, words)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (Fault, Left, Unfit, UserError, FileNotFoundError) as error:
        say(str(error))
        return 1
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    product = result["matmul"]["flops"] * args.steps / statistics.median(result["matmul"]["seconds"])
    print(aligned(table(result)))
    print(f"a large matmul: {product / 1e12:.3f} TFLOP/s; {result['flops']['causal'] / 1e9:.3f} GFLOP per token causal")
    for name, reason in (result["left_out"] | result["failed"]).items():
        print(f"not measured: {name}: {reason}")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
