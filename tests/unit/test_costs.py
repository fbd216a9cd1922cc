"""The costs of a step: an operation's own time is without that of the operations inside it."""

from typing import Any

from benchmarks.costs import costs


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
