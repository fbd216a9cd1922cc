"""What is compiled after a run has settled is counted, and told by its cause."""

import logging

import pytest
import torch

from titanlite.compilation import RecompilationWatch


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    torch._dynamo.reset()


def test_a_compilation_after_the_run_has_settled_is_counted_and_its_cause_told(compiled, caplog):
    watch = RecompilationWatch()
    with caplog.at_level(logging.WARNING, logger="titanlite"):
        compiled(torch.ones(2))
        watch.check(1)  # nothing has settled yet
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
