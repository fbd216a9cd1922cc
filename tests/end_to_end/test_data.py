"""The data path of a user: text to token files, two sources, chats, workers, and data that change during a run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import forked
from tests.end_to_end.forked import Done, prepare, titanlite
from tests.end_to_end.test_run_train import reports
from titanlite.data.prepare.cache import train_tokenizer

RUN: dict[str, dict[str, Any]] = {
    "model": {"hf_assets_path": "assets"},
    "training": {
        **{"dataset": None, "steps": 6, "local_batch_size": 2, "global_batch_size": 4},
        **{"document_policy": "best_fit", "document_mask": True},
        "sources": [{"path": "tokens", "weight": 3.0}, {"path": "chats.jsonl", "weight": 1.0}],
    },
    "validation": {
        **{"enable": True, "freq": 3, "steps": 1},
        "sources": [{"path": "tokens"}, {"path": "held.txt", "name": "held out"}],
    },
    "checkpoint": {"enable": True, "interval": 3},
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text, chats, a tokenizer with a chat template, and token files that the command wrote."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "assets").mkdir()
    texts = [f"item {number} of {number % 7}: " + "some words and more " * (number % 11) for number in range(300)]
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "held.txt").write_text("item of some words " * 200)
    turns = [
        [{"role": "user", "content": f"item {number}"}, {"role": "assistant", "content": f"some words {number}"}] * 2
        for number in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    train_tokenizer(texts).save(str(folder / "assets" / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))
    prepare(folder, "tests.tiny", **RUN)
    words = ["--input", "raw.jsonl", "--output", "tokens", "--tokenizer", "assets", "--append-eos"]
    assert titanlite("tokenize", *words, folder=folder).code == 0
    return folder


def train(folder: Path, out: str, *options: str, ranks: int = 1) -> Done:
    return forked.train("run.toml", "--job.dump_folder", out, *options, folder=folder, ranks=ranks)


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    ended = train(folder, "one")
    assert ended.code == 0, ended.err
    return folder


def test_two_sources_one_of_chats_train_and_two_more_are_validated(finished):
    found = reports(finished / "one")
    assert [report["step"] for report in found] == list(range(1, 7))
    measured = {key for report in found for key in report if key.startswith("validation_loss")}
    assert measured == {"validation_loss", "validation_loss/tokens", "validation_loss/held out"}


def test_two_ranks_with_workers_see_the_same_losses(finished):
    ended = train(finished, "two", "--dataloader.workers", "2", ranks=2)
    assert ended.code == 0, ended.err
    assert "Warning" not in ended.err and "Traceback" not in ended.err
    for found, expected in zip(reports(finished / "two"), reports(finished / "one"), strict=True):
        for key in ("loss", "grad_norm", "validation_loss/tokens", "validation_loss/held out"):
            assert found.get(key) == (pytest.approx(expected[key], rel=1e-5) if key in expected else None)


def test_data_changed_since_a_checkpoint_is_refused_with_the_change(finished):
    """The text of a source is edited; the run is resumed. tests/unit/test_resume.py allows it."""
    shutil.copytree(finished, changed := finished.with_name("changed"))
    chats = (changed / "chats.jsonl").read_text().splitlines(keepends=True)
    (changed / "chats.jsonl").write_text("".join(chats[:-1]))
    more = ["--training.steps", "8", "--lr_scheduler.total_steps", "6", "--lr_scheduler.min_lr_factor", "0.1"]
    ended = train(changed, "one", *more, "--checkpoint.allow_changes", "lr_scheduler.*")
    assert ended.code == 2
    (line,) = (line for line in ended.err.splitlines() if " data = " in line)
    assert re.search(r"'chats.jsonl: .*in 59 documents.*was 'chats.jsonl: .*in 60 documents", line), line
    assert "tokens:" not in line
