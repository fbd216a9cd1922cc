"""A loss of the user's own: what is refused before any process starts. distributed/test_own_loss.py trains with one."""

import importlib
import logging
import threading
import types

import pytest
import torch.nn.functional as F

from models import llama3
from models.head import Head
from tests import tiny
from tests.distributed.scenarios import config_of
from titanlite.loop import checks
from titanlite.loop.loss import faults
from titanlite.registry.check import found_by
from titanlite.registry.family import family_of
from titanlite.transforms.meta import on_meta

# The function's body, its options, and the message besides key and file.
WRONG = {
    "of the chunk": ("(logits.logsumexp(-1)).mean()", {}, "returns a tensor of shape () for 3 tokens"),
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
def test_a_wrong_loss_is_one_message_with_its_key_and_line(case, own_module):
    body, options, said = WRONG[case]
    file = own_module(f"def loss(logits, labels, share: float = 0.1):\n    return {body}\n")
    (fault,) = faults_of("own_code:loss", **options)
    assert said.replace("MODULE", str(file)) in fault
    assert fault.startswith("training.loss") and (options or str(file) in fault)


def test_a_correct_loss_is_not_refused():
    assert faults_of("tests.own.parts:smoothed", share=0.2) == []


class ScaledHead(Head):
    """Its loss is that of Head, of other hidden states."""

    def forward(self, hidden, labels=None, teacher=None):
        return super().forward(hidden * 0.5, labels, teacher)


class OwnLossHead(Head):
    """A class made from Head whose loss is its own."""

    def forward(self, hidden, labels=None):
        logits = self.output(self.norm(hidden))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def with_head(kind: type[Head], family: types.ModuleType = tiny) -> type[llama3.Model]:
    class Model(family.Model):
        def __init__(self, config):
            super().__init__(config)
            self.head = kind(self.head.norm, config.dim, config.vocab_size)

    return Model


@pytest.mark.parametrize("head, refused", [(ScaledHead, False), (OwnLossHead, True)])
@pytest.mark.parametrize("keys", [{"z_loss": 0.1}, {"loss": "tests.own.parts:smoothed"}], ids=str)
def test_options_of_a_loss_that_a_class_made_from_head_does_not_compute_are_refused(monkeypatch, head, refused, keys):
    """They had no effect, without a message."""
    monkeypatch.setattr(tiny, "Model", with_head(head))
    config = config_of({}, training=keys)
    found = list(faults(config, family := family_of(config.model), on_meta(family, config)))
    assert len(found) == refused
    assert all("the head of tests.tiny does not compute its loss by models.head.Head" in fault for fault in found)


def test_a_part_that_does_not_return_is_named_with_its_line(own_module, tmp_path, monkeypatch, caplog):
    file = own_module("def loss(logits, labels):\n    returning.wait(600)\n    return logits.logsumexp(-1)\n")
    monkeypatch.setattr(checks, "_PATIENCE", 0.05)
    returning = importlib.import_module("own_code").returning = threading.Event()

    def release(record: logging.LogRecord) -> bool:
        if str(file) in record.getMessage():
            returning.set()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [release])
    config = config_of({}, "large", job={"dump_folder": str(tmp_path)}, training={"loss": "own_code:loss"})
    with caplog.at_level(logging.WARNING):
        assert checks.check(config, "run.toml", 1, open_files=False) == []
    assert f"checking loss: waiting for {file}, line 2" in caplog.text
