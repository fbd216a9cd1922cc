"""Damages one file of a run that has stopped, and continues with it: `make campaign PART=damage`.

A file is a checkpoint's, a report's, the configuration's or a token folder's; the damage is a bit, a hole, a shorter or longer
file, none at all, or the contents of its neighbor. Afterwards the run either continues, and every further step equals that of
the undamaged run bit for bit, or it ends with a message that names the file, and checkpoints, data and reports are unchanged.
"""

import collections
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.campaigns import Mesh, Report, Step, committed, run_folder, starts, trajectory
from tests.end_to_end.forked import Done, titanlite, train
from titanlite.data.prepare.cache import train_tokenizer

STOPPED, STEPS = 4, 6
WORDS = ("--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0", "--lr_scheduler.total_steps", "10")
WORDS += ("--training.dataset_path", "tokens", "--model.hf_assets_path", "assets")


def _flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _hole(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + bytes(len(content[start : start + 64])) + content[start + 64 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit": _flip,
    "zeros": _hole,
    "shorter": lambda content, draw: content[: draw.randrange(len(content))],
    "empty": lambda content, draw: b"",
    "longer": lambda content, draw: content + draw.randbytes(1 + draw.randrange(64)),
}


def step(folder: Path, last: int, mesh: Mesh) -> Done:
    """The run, to step `last`."""
    batch = ("--training.global_batch_size", 2 * mesh.shards * mesh.stages)  # one microbatch per stage
    return train("run.toml", "--training.steps", last, *WORDS, *batch, *mesh.words, folder=folder, ranks=mesh.ranks)


def damage(folder: Path, draw: random.Random) -> tuple[Path, str]:
    """Damages a file of a stopped run; -> (the file, how)."""
    chosen = [path for place in ("out", "tokens") for path in sorted((folder / place).rglob("*")) if path.is_file()]
    chosen = [path for path in chosen if path.stat().st_size and "events.out" not in path.name]
    path = draw.choice(chosen)
    kind = draw.choice([*DAMAGES, "removed", "its neighbor's"])
    if kind == "removed":
        path.unlink()
    elif kind == "its neighbor's":
        neighbors = [other for other in path.parent.iterdir() if other.is_file() and other != path]
        shutil.copyfile(draw.choice(sorted(neighbors or {*chosen} - {path})), path)  # any other, where it is alone
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes(), draw))
    return path, kind


def contents(folder: Path) -> dict[str, bytes]:
    """Checkpoints, tokens and reports, without lock files, which each start writes."""
    files = [path for place in ("out/checkpoint", "tokens") for path in (folder / place).rglob("*") if path.is_file()]
    kept = [path for path in [*files, folder / "out/metrics.jsonl"] if path.exists() and path.name != ".lock"]
    return {str(path): path.read_bytes() for path in kept}


def fault(folder: Path, path: Path, before: dict[str, bytes], ended: Done, expected: dict[int, Step]) -> str:
    """The fault in the outcome of a damaged run; "" if there is none."""
    if "Traceback" in ended.err:
        return "a traceback"
    if ended.code == 2:
        if path.name not in ended.err and path.parent.name not in ended.err:
            return "another file is named"
        return "" if contents(folder) == before else "changed files"
    if ended.code != 0:
        return f"exit code {ended.code}"
    began = starts(folder / "out")[-1] if path.name != "provenance.json" else STOPPED
    added = {number: step for number, step in trajectory(folder / "out").items() if number > began}
    if list(added) != list(range(began + 1, STEPS + 1)):
        return f"steps {list(added)} after step {began}"
    if any(expected[number] != step for number, step in added.items()):
        return "another loss"
    return "" if STEPS in committed(folder / "out") else "no checkpoint at the end"


def campaign(folder: Path, cases: int, seed: int, mesh: Mesh) -> Report:
    """Damages in copies of one stopped run, in `folder`."""
    counts, broken = collections.Counter[str](), []
    whole = run_folder(folder / "whole")
    (whole / "assets").mkdir()
    train_tokenizer([(whole / "data.txt").read_text()]).save(str(whole / "assets/tokenizer.json"))
    places = ("--input", "data.txt", "--output", "tokens", "--tokenizer", "assets")
    made = [titanlite("tokenize", *places, "--append-eos", folder=whole), step(whole, STOPPED, mesh)]
    stopped = shutil.copytree(whole, folder / "stopped", symlinks=True)
    made.append(step(whole, STEPS, mesh))
    expected = trajectory(whole / "out")
    assert [done.code for done in made] == [0, 0, 0] and list(expected) == list(range(1, STEPS + 1)), made
    for number in range(cases):
        copy = shutil.copytree(stopped, folder / f"case-{number}", symlinks=True)
        path, kind = damage(copy, random.Random(f"{seed}/{number}"))
        before = contents(copy)
        ended = step(copy, STEPS, mesh)
        counts[kind] += 1
        counts["refused" if ended.code == 2 else "went on"] += 1
        if wrong := fault(copy, path, before, ended, expected):
            broken.append(f"{path.relative_to(copy)}, {kind}: {wrong}: {ended.err[-600:]}")
        else:
            shutil.rmtree(copy)
    kinds = " ".join(f"{kind}: {counts[kind]}" for kind in (*DAMAGES, "removed", "its neighbor's"))
    figures = {
        "mesh": str(mesh),
        "damages": cases,
        "    by kind": kinds,
        "went on, refused": f"{counts['went on']} {counts['refused']}",
        "broken": len(broken),
    }
    return Report(figures, broken)
