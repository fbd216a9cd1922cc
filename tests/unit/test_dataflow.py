"""The tensors that stages send, and models that are refused because a block leaves state for another."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models import llama3
from models.attention import SeqInfo, with_mask
from models.rope import rotation
from tests import block_graphs, tiny
from tests.block_graphs import EXPLICIT, HIDDEN, drawn
from tests.distributed.scenarios import config_of
from titanlite.loop.checks import check
from titanlite.parallel import dataflow, pipeline
from titanlite.parallel.dataflow import Replay, not_carried, trace
from titanlite.registry.family import Family, family_names, family_of, load_family, load_module

# way: (a word of the reason, the line that it names, a part of that line's text)
REFUSED = {
    "attribute": ("layers.2 uses a tensor that is none of its arguments", "x = x + 0.1 * self.used("),
    "list": ("layers.1 changes a list or a dict among its arguments", "layer(x, rope, seq"),
    "counter": ("layers.2 computes something else without what earlier blocks leave in Python", "x * self.others.count"),
    "parameter": ("layers.2 uses layers.1.ffn_norm.weight, which is not its own", "return x * maker.ffn_norm.weight"),
    "module": ("layers.2 shares layers.1.ffn_norm.weight", "layer(x, rope, seq"),
    "in place": ("layers.2 writes into a tensor that others use", "return x.add_(1.0)"),
    "head": ("head uses a tensor that is none of its arguments", "hidden = hidden + 0.1 * made"),
    "again": ("layers.0 runs again after layers.3", "layer(x, rope, seq"),
}


def graph(uses: str) -> Family:
    return load_family("tests.block_graphs", "deep", overrides={"graph": uses})


def crossings(family: Family) -> list[int]:
    """The number of tensors that each stage sends to the next, with one block per stage."""
    flow = trace(family.on_meta(), 1, 16)
    return [len(flow.crossing(call)) for call in range(2, len(flow.calls) - 1)]


@pytest.mark.parametrize("way", HIDDEN)
def test_state_that_a_block_leaves_in_python_is_refused_with_the_line(way):
    reason, line = REFUSED[way]
    found = not_carried(graph(f"2 {way} 1"))
    assert found.startswith(reason)
    number = int(found.rsplit("block_graphs.py, line ", 1)[1].rstrip(")"))
    with open(block_graphs.__file__) as file:
        assert line in file.read().splitlines()[number - 1]


@pytest.mark.parametrize("seed", range(10))
def test_a_random_graph_is_refused_if_and_only_if_a_use_is_hidden(seed):
    numbers = random.Random(seed)
    uses = drawn(numbers, EXPLICIT if seed % 2 else EXPLICIT + HIDDEN)
    hidden = any(way in HIDDEN for _, way, _ in graph(uses).config.uses())
    assert bool(not_carried(graph(uses))) == hidden, uses


def test_a_model_is_examined_once_for_all_meshes_and_again_when_its_class_is_another(monkeypatch):
    """As after `importlib.reload` in a notebook, in which a refused model was repaired."""
    traced = []
    monkeypatch.setattr(dataflow, "_KNOWN", {})
    monkeypatch.setattr(dataflow, "trace", lambda *args, **kwargs: (traced.append(args), trace(*args, **kwargs))[1])
    assert not_carried(graph("3 value 1")) == not_carried(graph("3 value 1")) == ""
    once = len(traced)
    assert not_carried(graph("2 list 1")) and len(traced) == once + 1  # refused in the first trace
    monkeypatch.setattr(block_graphs, "Model", type("Model", (block_graphs.Model,), {}))
    assert not_carried(graph("2 list 1")) and len(traced) == once + 2


@pytest.mark.parametrize("name", [*family_names(), "tests.tiny_hybrid"])
def test_families_pass_only_hidden_states_to_the_next_stage(name):
    family = load_family(name, next(iter(load_module(name).FLAVORS)))
    assert not_carried(family) == ""
    assert set(crossings(family)) == {1}


def test_tensors_are_sent_to_later_stages_as_long_as_a_block_uses_them():
    assert crossings(graph("2 value 0")) == [2, 2, 1]
    assert crossings(load_family("tests.forks.right.value_residual", "deep")) == [2, 2, 2]


class Local(llama3.Block):
    """A kind of blocks."""


class OfTwoKinds(llama3.Model):
    """It asks for the kind of a block."""

    def __init__(self, config: llama3.Config):
        super().__init__(config)
        for name in ("1", "3"):
            self.layers[name] = Local(config)

    def forward(self, x: torch.Tensor, seq: SeqInfo) -> torch.Tensor:
        c, x, seq = self.config, self.embed(x), with_mask(seq)
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            assert isinstance(layer, nn.Module)
            x = layer(2 * x if isinstance(layer, Local) else x, rope, seq)
        return x


def test_stages_compute_what_one_process_does_where_a_model_asks_for_the_class_of_a_block():
    family = Family(SimpleNamespace(**vars(tiny) | {"Model": OfTwoKinds}), tiny.FLAVORS["deep"])
    model, flow = family.on_meta().to_empty(device="cpu"), trace(family.on_meta(), 1, 16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    tokens, seq = torch.arange(16)[None], SeqInfo(torch.arange(16)[None])
    first = Replay(model, flow, flow.calls_of({"embed", "layers.0", "layers.1"}), last=False)
    second = Replay(model, flow, flow.calls_of({"layers.2", "layers.3", "head"}), last=True)
    assert torch.equal(second(first((), tokens, seq), tokens, seq), model(tokens, seq))


def test_a_start_refuses_state_that_is_left_in_python(tmp_path):
    model = {"name": "tests.block_graphs", "overrides": {"graph": "3 attribute 0"}}
    batch = {"global_batch_size": 8, "local_batch_size": 1}
    config = config_of({"pp": 2}, "deep", model=model, training=batch, job={"dump_folder": str(tmp_path)})
    with pytest.raises(ValueError, match=r"layers\.3 uses a tensor that is none") as error:
        check(config, "my.toml", 2, open_files=False)
    assert "block_graphs.py, line " in str(error.value)


def test_whole_numbers_between_stages_are_refused_before_pytorch_2_13(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "BEFORE_2_13", True)
    batch = {"global_batch_size": 8, "local_batch_size": 1}
    for uses, refused in (("2 value 0", False), ("2 integers 0", True)):
        model = {"name": "tests.block_graphs", "overrides": {"graph": uses}}
        config = config_of({"pp": 2}, "deep", model=model, training=batch, job={"dump_folder": str(tmp_path)})
        family = family_of(config.model)
        found = [*pipeline.faults(config, family, family.on_meta())]
        assert any("whole numbers of earlier stages" in fault for fault in found) == refused, found


def test_a_forward_pass_that_depends_on_data_is_an_error_while_it_runs():
    family = graph("2 number 1")
    model, flow = family.on_meta().to_empty(device="cpu"), trace(family.on_meta(), 1, 16)
    stage = Replay(model, flow, flow.calls_of({"embed", "layers.0", "layers.1"}), last=False)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert len(stage((), tokens, SeqInfo(tokens))) == 1
    model.eval()
    stage((), tokens, SeqInfo(tokens))
    assert not stage.view.training
    model.layers["1"].number = 7
    with pytest.raises(dataflow.NotCarried, match=r"layers\.1 returns 9, and returned 3 when"):
        stage((), tokens, SeqInfo(tokens))
