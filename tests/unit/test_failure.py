"""The handler of unexpected exceptions: its text, and that it works on a full disk too."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limited import disk
from titanlite.config.schema import Config
from titanlite.ground import errors
from titanlite.ground.errors import phase
from titanlite.ground.untrusted import FileSchema, read_json
from titanlite.launch import failure
from titanlite.loop.metrics import Reporter


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    with disk(tmp_path / "disk", "size=256k") as folder:
        yield folder


def fill(disk: Path) -> Path:
    """A file that fills a disk completely."""
    with open(disk / "all of it", "wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return disk / "all of it"


@pytest.fixture(autouse=True)
def notes(monkeypatch) -> None:
    monkeypatch.setattr(errors, "_position", (0, "starting"))
    monkeypatch.setattr(errors, "last_file", "")


def test_a_report_names_phase_error_line_file_and_the_file_with_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(KeyError) as caught, phase("opening the data"):  # it stays after an error
        with phase("reading the tokenizer"):
            pass  # this phase has ended
        _ = read_json(tmp_path / "manifest.json", FileSchema, 10)["shards"]
    line, *frames = failure.report(caught.value, "titanlite verify").splitlines()
    assert line.startswith(
        "titanlite verify, starting, opening the data: KeyError: 'shards' (tests/unit/test_failure.py, line "
    )
    assert f"; read last: {tmp_path / 'manifest.json'}; traceback: {tmp_path / 'titanlite-'}" in line
    assert "in test_a_report_names" in frames[0] and "read_json(" in frames[1]  # the user's own code, since it is not a library
    assert "Traceback (most recent call last)" in Path(line.rpartition("traceback: ")[2]).read_text()


def test_a_full_disk_does_not_suppress_a_report(monkeypatch, small_disk):
    fill(small_disk)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(small_disk))
    try:
        raise KeyError("boom")
    except KeyError as error:
        text = failure.report(error, "titanlite check")
    assert "KeyError: 'boom'" in text and "Traceback (most recent call last)" in text


def test_metrics_on_a_full_disk_warn_and_are_written_when_there_is_room_again(small_disk, caplog):
    config = Config.model_validate({"job": {"dump_folder": str(small_disk)}, "metrics": {"enable_tensorboard": False}})
    reporter = Reporter(config, 1, active=True)
    full = fill(small_disk)
    for step in range(1, 5):
        reporter.report(step, {"loss": 1.0 / step, "text": "x" * 3000})
    assert f"{small_disk / 'metrics.jsonl'}: cannot be written: No space left on device; training continues" in caplog.text
    full.unlink()
    reporter.report(5, {"loss": 0.2})
    reporter.close()
    assert [json.loads(line)["step"] for line in (small_disk / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
