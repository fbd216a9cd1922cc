"""The costs of a step: an operation's own time is without that of the operations inside it."""

from typing import Any

from benchmarks.costs import costs, kinds


def event(name: str, start: float, length: float, thread: int = 1, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 1, "tid": thread}


def test_what_is_inside_an_operation_is_not_counted_twice():
    events = [
        event("inner", 2, 3),
        event("outer", 0, 10),
        event("inner", 6, 1),
        event("after", 10, 2),
        event("elsewhere", 0, 4, 2),
    ]
    spent, calls = costs({"traceEvents": [*events, {"ph": "i", "name": "a mark"}]})
    assert spent == {"outer": 6, "inner": 4, "after": 2, "elsewhere": 4}
    assert calls == {"outer": 1, "inner": 2, "after": 1, "elsewhere": 1}


def test_of_a_gpu_the_kernels_count():
    spent, _ = costs({"traceEvents": [event("aten::mm", 0, 9), event("gemm", 3, 5, 7, "kernel")]})
    assert spent == {"gemm": 5}


def test_a_gpus_time_is_split_into_kinds_of_kernels_and_what_is_idle():
    kernels = [
        event("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 0, 10, 7, "kernel"),
        event("triton_poi_fused__scaled_dot_product_flash_attention_mul_0", 10, 2, 7, "kernel"),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 15, 5, 7, "kernel"),
        event("triton_poi_fused_add_1", 18, 4, 8, "kernel"),  # at the same time, on another stream
        event("triton_poi_fused_add_2", 30, 3, 7, "kernel"),
        event("Memcpy DtoD", 33, 1, 7, "gpu_memcpy"),
    ]
    around = [event("Optimizer.step#AdamWBf16.step", 29, 4, 7, "gpu_user_annotation"), event("aten::mm", 0, 99)]
    found = kinds({"traceEvents": [*kernels, *around]})
    expected = {"matrix products": 10, "elementwise and reductions": 6, "attention": 5, "optimizer": 3, "copies": 1}
    assert found == {**expected, "idle": 3 + 8}
    assert kinds({"traceEvents": around}) == {}
