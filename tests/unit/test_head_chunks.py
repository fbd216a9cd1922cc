"""The measurement of chunk sizes: a row for each size that makes other chunks."""

import torch

from benchmarks.head_chunks import measure, table


def test_sizes_that_make_equal_chunks_are_measured_once(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = measure(torch.device("cpu"), 8, 64, 32, logits=(64, 512, 4096, 8192), repeats=1)
    assert [(row.logits, row.chunk) for row in rows] == [(64, 1), (512, 8), (4096, 32)]
    assert all(row.milliseconds > 0 and row.peak_bytes == 0 for row in rows)
    assert table(rows).splitlines()[2].startswith("| 2^6 | 1 | ")
