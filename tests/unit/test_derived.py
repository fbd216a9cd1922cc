"""What the start of a log says of the process's settings is what they are."""

import pytest
import torch

from titanlite.loop.summary import settings


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("LD_PRELOAD", "MALLOC_TRIM_THRESHOLD_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "the system's default"),
        ({"MALLOC_TRIM_THRESHOLD_": "1099511627776"}, "freed memory is kept"),
        ({"LD_PRELOAD": "/usr/lib/libtcmalloc_minimal.so.4"}, "libtcmalloc_minimal.so.4"),
    ],
)
def test_the_allocator_of_a_cpu_is_told(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert settings(7) == f"garbage collected every 7 steps; memory: {expected}; float32 products: exact"


def test_the_allocator_of_a_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "memory: PyTorch's default;" in settings(1)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "memory: expandable_segments:True;" in settings(1)


def test_a_precision_of_products_that_is_not_exact_is_told():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert settings(1).endswith("float32 products: TF32")
    finally:
        torch.set_float32_matmul_precision(before)
