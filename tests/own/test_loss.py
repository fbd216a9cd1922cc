"""A loss of the user's own: what is refused before any process starts. distributed/test_own_loss.py trains with one."""

import importlib
import logging
import threading

import pytest

from tests.distributed.scenarios import config_of
from titanlite.loop import checks
from titanlite.loop.loss import faults
from titanlite.registry.check import found_by
from titanlite.registry.family import family_of
from titanlite.transforms.meta import on_meta

# The function's body, its options, and the message besides key and file.
WRONG = {
    "of the chunk": ("(logits.logsumexp(-1)).mean()", {}, "returns a tensor of shape () for 3 tokens"),
    "no tensor": ("0.5", {}, "returns 0.5 for 3 tokens"),
    "detached": ("logits.detach().logsumexp(-1)", {}, "does not depend on the logits"),
    "raises": ("logits[:, labels + 10**6].sum(1)", {}, "fails (MODULE, line 2): "),
    "not finite": ("(logits - logits).log().sum(-1)", {}, "for logits of a normal distribution"),
    "misspelt option": ("logits.sum(-1)", {"shar": 0.1}, "training.loss_options.shar: "),
}


def faults_of(loss: str, **options) -> list[str]:
    config = config_of({}, training={"loss": loss, "loss_options": options})
    family = family_of(config.model)
    return list(found_by(faults, config, family, on_meta(family, config)))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_loss_is_one_message_with_its_key_and_line(case, tmp_path, monkeypatch):
    body, options, said = WRONG[case]
    module = f"wrong_{list(WRONG).index(case)}"
    file = tmp_path / f"{module}.py"
    file.write_text(f"def loss(logits, labels, share: float = 0.1):\n    return {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (fault,) = faults_of(f"{module}:loss", **options)
    assert said.replace("MODULE", str(file)) in fault
    assert fault.startswith("training.loss") and (options or str(file) in fault)


def test_a_correct_loss_is_not_refused():
    assert faults_of("tests.own.parts:smoothed", share=0.2) == []


def test_a_part_that_does_not_return_is_named_with_its_line(tmp_path, monkeypatch, caplog):
    file = tmp_path / "endless_loss.py"
    file.write_text("def loss(logits, labels):\n    returning.wait(600)\n    return logits.logsumexp(-1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(checks, "_PATIENCE", 0.05)
    returning = importlib.import_module("endless_loss").returning = threading.Event()
    warn = checks.log.warning

    def warning(*args):
        warn(*args)
        if str(file) in args:
            returning.set()

    monkeypatch.setattr(checks.log, "warning", warning)
    config = config_of({}, "large", job={"dump_folder": str(tmp_path)}, training={"loss": "endless_loss:loss"})
    with caplog.at_level(logging.WARNING):
        assert checks.check(config, "run.toml", 1, open_files=False) == []
    assert f"checking loss: waiting for {file}, line 2" in caplog.text
