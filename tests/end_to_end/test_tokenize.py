"""`titanlite tokenize` as a user runs it: what it prints, and what remains when it is killed at any instant."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launcher import Ended, Launch, finish, launch
from tests.waiting import until
from titanlite.data.indexed import TokenFile
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.prepare.documents import stdlib_files


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder with a tokenizer, and some MB of text: one or two seconds of work, in several units."""
    folder = tmp_path_factory.mktemp("text")
    files = [file.read_text() for file in stdlib_files()[:150]]
    (folder / "assets").mkdir()
    train_tokenizer(files[:40]).save(str(folder / "assets" / "tokenizer.json"))
    lines = [json.dumps({"text": file[start : start + 3000]}) + "\n" for file in files for start in range(0, len(file), 3000)]
    (folder / "a.jsonl").write_text("".join(lines * 2))
    (folder / "few.jsonl").write_text("".join(lines[:5]))
    return folder


def _tokenize(text: Path, output: Path, *options: str, data: str = "a.jsonl") -> Launch:
    usual = {"--input": str(text / data), "--output": str(output), "--tokenizer": str(text / "assets")}
    words = [word for name, value in usual.items() if name not in options for word in (name, value)]
    command = ["-m", "titanlite", "tokenize", *words, *options]
    return launch(*command, folder=output.parent, script=Path(sys.executable))


def _run(text: Path, output: Path, *options: str, data: str = "a.jsonl") -> Ended:
    return finish(_tokenize(text, output, *options, data=data))


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _workers(started: Launch) -> list[int]:
    """The command's processes that tokenize."""
    found = []
    for pid in started.pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"multiprocessing.spawn" in command:
            found.append(pid)
    return found


def _units(output: Path) -> list[Path]:
    return [path for path in output.with_name(f"{output.name}.unfinished").glob("units/*") if path.suffix != ".tmp"]


# --------------------------------------------------------------------------------------------------------------- output


def test_the_command_prints_counts_and_the_line_for_the_configuration(text, tmp_path):
    ended = _run(text, tmp_path / "out", "--append-eos", "--shard-tokens", "1e3", data="few.jsonl")
    assert ended.code == 0, ended.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["documents"] == 5 and len(manifest["shards"]) == 2
    assert f"5 documents, {manifest['tokens']:,} tokens, {len(manifest['shards'])} shards" in ended.out
    assert f'training.dataset_path = "{tmp_path / "out"}"' in ended.out
    assert re.fullmatch(r"tokenized 5 documents, [\d,]+ tokens/s\n", ended.err)  # and no bar in a log file
    assert sum(TokenFile(tmp_path / "out" / shard["name"]).tokens for shard in manifest["shards"]) == manifest["tokens"]


def test_the_first_ten_skipped_entries_are_printed_and_all_are_listed(text, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "sound"}\n' + "{\n" * 15)
    ended = _run(text, tmp_path / "out", "--on-error", "skip", data=str(tmp_path / "bad.jsonl"))
    assert ended.code == 0, ended.err
    assert "15 skipped" in ended.out
    printed = re.findall(r"bad\.jsonl, line (\d+): not JSON", ended.out)
    assert printed == [str(number) for number in range(2, 12)]
    assert len((tmp_path / "out" / "skipped.jsonl").read_text().splitlines()) == 15


def test_a_fault_is_one_message_with_file_line_and_the_option_that_skips_it(text, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "sound"}\n{"body": 1}\n')
    ended = _run(text, tmp_path / "out", data=str(tmp_path / "bad.jsonl"))
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r'.*bad\.jsonl, line 2: must have .*; has "body"\n--on-error skip .*\n', ended.err)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------------- killed


def test_killed_after_its_first_unit_it_does_not_do_that_again_and_gives_the_same_files(text, tmp_path):
    process = _tokenize(text, tmp_path / "out", "--workers", "2")
    until(lambda: _units(tmp_path / "out"))
    os.killpg(process.process.pid, signal.SIGKILL)
    finish(process)
    times = {path: path.stat().st_mtime_ns for path in _units(tmp_path / "out")}
    assert times
    ended = _run(text, tmp_path / "out", "--workers", "1")
    assert ended.code == 0, ended.err
    assert re.search(r"; (\d+) of \d+ units were finished before", ended.err)[1] == str(len(times))
    assert _run(text, tmp_path / "whole", "--workers", "2").code == 0
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


@pytest.mark.slow
def test_no_worker_outlives_a_command_that_was_killed(text, tmp_path):
    process = _tokenize(text, tmp_path / "out", "--workers", "2")
    until(lambda: len(_workers(process)) == 2)
    process.process.kill()
    ended = finish(process)
    assert ended.left == []


@pytest.mark.slow
def test_a_killed_worker_ends_the_command_which_says_how_to_continue(text, tmp_path):
    process = _tokenize(text, tmp_path / "out", "--workers", "2")
    until(lambda: len(_workers(process)) == 2)
    os.kill(_workers(process)[0], signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 2
    assert "has ended by signal 9" in ended.err and "the same command continues" in ended.err
    assert "Traceback" not in ended.err
    assert ended.left == []
    assert _run(text, tmp_path / "out", "--workers", "2").code == 0


_INSTANTS = {
    "planned": lambda process, out: (out.with_name("out.unfinished") / "plan.json").exists(),
    "workers": lambda process, out: _workers(process),  # with --workers 1 the command has no worker process
    "a unit": lambda process, out: _units(out),
}


@pytest.mark.parametrize(
    ("workers", "instant"),
    [
        ("2", "workers"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("1", "planned"), ("1", "a unit"), ("2", "a unit")]),
    ],
)
def test_ctrl_c_ends_all_processes_at_once_and_quietly(text, tmp_path, workers, instant):
    process = _tokenize(text, tmp_path / "out", "--workers", workers)
    until(lambda: _INSTANTS[instant](process, tmp_path / "out"), lambda: process.process.poll() is None)
    os.killpg(process.process.pid, signal.SIGINT)  # as a terminal does
    ended = finish(process)
    assert not (tmp_path / "out").exists()
    assert (ended.code, ended.out, ended.err, ended.left) == (130, "", "", [])
