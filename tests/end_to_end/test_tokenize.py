"""`titanlite tokenize` as a user runs it: what it prints, and what remains when it is killed at any instant."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.forked import Done, titanlite
from tests.end_to_end.launcher import Launch, finish, launch
from tests.repetitions import slow_but
from tests.waiting import until
from titanlite.data.indexed import TokenFile
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.prepare.documents import stdlib_files
from titanlite.ground.files import unfinished_path


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


def _words(text: Path, data: str, *options: str) -> list[str]:
    paths = ["--input", str(text / data), "--output", "out", "--tokenizer", str(text / "assets")]
    return ["tokenize", *paths, *options]


def _start(text: Path, folder: Path, workers: str = "2") -> Launch:
    words = _words(text, "a.jsonl", "--workers", workers)
    return launch("-m", "titanlite", *words, folder=folder, script=Path(sys.executable))


def _run(text: Path, folder: Path, *options: str, data: str = "a.jsonl") -> Done:
    return titanlite(*_words(text, data, *options), folder=folder)


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
    return [path for path in unfinished_path(output).glob("units/*") if path.suffix != ".tmp"]


# --------------------------------------------------------------------------------------------------------------- output


def test_the_command_prints_counts_and_the_line_for_the_configuration(text, tmp_path):
    ended = _run(text, tmp_path, "--append-eos", "--shard-tokens", "1e3", data="few.jsonl")
    assert ended.code == 0, ended.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["documents"] == 5 and len(manifest["shards"]) == 2
    assert f"5 documents, {manifest['tokens']:,} tokens, {len(manifest['shards'])} shards" in ended.out
    assert f'training.dataset_path = "{tmp_path / "out"}"' in ended.out
    assert ended.out.splitlines()[-1] == "texts begin with no BOS and end with <|endoftext|>"
    assert re.fullmatch(r"tokenized 5 documents, [\d,]+ tokens/s\n", ended.err)  # and no bar in a log file
    assert sum(TokenFile(tmp_path / "out" / shard["name"]).tokens for shard in manifest["shards"]) == manifest["tokens"]


def test_a_fault_is_one_message_with_the_option_that_skips_it_and_then_the_first_ten_are_printed_and_all_listed(text, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "sound"}\n' + "{\n" * 15)
    ended = _run(text, tmp_path, data=str(tmp_path / "bad.jsonl"))
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r".*bad\.jsonl, line 2: .*\n--on-error skip .*\n", ended.err)
    assert not (tmp_path / "out").exists()
    ended = _run(text, tmp_path, "--on-error", "skip", data=str(tmp_path / "bad.jsonl"))
    assert ended.code == 0, ended.err
    assert "15 skipped" in ended.out
    assert "end with nothing; --append-eos ends them with <|endoftext|>" in ended.out.splitlines()[-1]
    assert re.findall(r"bad\.jsonl, line (\d+): not JSON", ended.out) == [str(number) for number in range(2, 12)]
    assert len((tmp_path / "out" / "skipped.jsonl").read_text().splitlines()) == 15


# --------------------------------------------------------------------------------------------------------------- killed


def test_killed_after_its_first_unit_it_does_not_do_that_again(text, tmp_path):
    """tests/unit/test_prepare.py compares the files."""
    process = _start(text, tmp_path)
    until(lambda: _units(tmp_path / "out"))
    os.killpg(process.process.pid, signal.SIGKILL)
    finish(process)
    finished = len(_units(tmp_path / "out"))
    ended = _run(text, tmp_path, "--workers", "1")
    assert ended.code == 0, ended.err
    assert re.search(r"; (\d+) of \d+ units were finished before", ended.err)[1] == str(finished)


@pytest.mark.slow
def test_no_worker_outlives_a_command_that_was_killed(text, tmp_path):
    process = _start(text, tmp_path)
    until(lambda: len(_workers(process)) == 2)
    process.process.kill()
    assert finish(process).left == []


@pytest.mark.slow
def test_a_killed_worker_ends_the_command_which_says_how_to_continue(text, tmp_path):
    process = _start(text, tmp_path)
    until(lambda: len(_workers(process)) == 2)
    os.kill(_workers(process)[0], signal.SIGKILL)
    ended = finish(process)
    assert (ended.code, ended.left) == (2, [])
    assert "has ended by signal 9" in ended.err and "the same command continues" in ended.err
    assert "Traceback" not in ended.err


_INSTANTS = {
    "1": lambda process, out: (unfinished_path(out) / "plan.json").exists(),  # it has no worker process
    "2": lambda process, out: _workers(process),
}


@pytest.mark.parametrize("workers", slow_but(["2"], _INSTANTS))
def test_ctrl_c_ends_all_processes_at_once_and_quietly(text, tmp_path, workers):
    process = _start(text, tmp_path, workers)
    until(lambda: _INSTANTS[workers](process, tmp_path / "out"), lambda: process.process.poll() is None)
    os.killpg(process.process.pid, signal.SIGINT)  # as a terminal does
    ended = finish(process)
    assert not (tmp_path / "out").exists()
    assert (ended.code, ended.out, ended.err, ended.left) == (130, "", "", [])
