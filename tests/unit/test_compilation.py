"""Recompilations after a run's first steps are counted, with their cause."""

import logging
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from models import llama3
from titanlite.config.schema import Compile
from titanlite.ground.errors import UserError
from titanlite.ground.files import cache_folder
from titanlite.transforms.compile import RecompilationWatch, compile_model


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    torch._dynamo.reset()


def test_a_late_recompilation_is_counted_and_its_cause_is_logged(compiled, caplog):
    watch = RecompilationWatch()
    with caplog.at_level(logging.WARNING, logger="titanlite"):
        compiled(torch.ones(2))
        watch.check(1)  # too early
        watch.settle()
        compiled(torch.ones(2))
        watch.check(2)
        assert (watch.recompilations, caplog.text) == (0, "")
        compiled(torch.ones(3))
        watch.check(3)
        watch.check(4)
    assert watch.recompilations == 1
    assert "step 3: recompiled" in caplog.text
    assert "size mismatch" in caplog.text
    assert "step 4" not in caplog.text


@pytest.mark.parametrize("nodes", [1, 2])
def test_compiled_code_is_cached_between_runs_on_one_node_unless_the_user_names_a_folder(monkeypatch, tmp_path, nodes):
    settings = {"TITANLITE_CACHE": str(tmp_path), "WORLD_SIZE": str(8 * nodes), "LOCAL_WORLD_SIZE": "8"}
    for name, value in (settings | {"TORCHINDUCTOR_CACHE_DIR": ""}).items():  # so that it is restored
        monkeypatch.setenv(name, value)
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    compile_model(llama3.Model(llama3.FLAVORS["debug"]), Compile(enable=True))
    # of several nodes, each has PyTorch's, in the folder for temporary files
    assert cache_dir() == (str(tmp_path / "inductor") if nodes == 1 else default_cache_dir())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    compile_model(llama3.Model(llama3.FLAVORS["debug"]), Compile(enable=True))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")


@pytest.mark.parametrize("home", ["no folder", "no home"])
def test_without_a_home_folder_that_can_be_written_compiled_code_is_where_pytorch_keeps_it(monkeypatch, tmp_path, home):
    for name in ("TITANLITE_CACHE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if home == "no home":
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
        with pytest.raises(UserError, match="set TITANLITE_CACHE"):
            cache_folder()
    compile_model(llama3.Model(llama3.FLAVORS["debug"]), Compile(enable=True))
    assert cache_dir() == default_cache_dir()


def test_a_forks_own_head_is_compiled_entirely():
    class Own(nn.Module):
        def forward(self, hidden, labels=None):
            return hidden

    model = llama3.Model(llama3.FLAVORS["debug"])
    model.head = Own()
    compile_model(model, Compile(enable=True, components=["loss"], backend="eager"))
    assert "forward" in vars(model.head)
    assert all("forward" not in vars(layer) for layer in model.layers.values())
