"""Wrong environment variables of the launchers."""

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from tests.hostile.judge import Case
from titanlite.launch import layout, process

# Invalid whole numbers in the environment. 010 is 8 in a shell; other scripts have digits too.
NOT_WHOLE = (
    "010", "08", "00", "+1", "-1", "-0", "1.0", "1e1", "1_0", "0x10", "0b1", "1 ", " 1", "1\n", "1,2", "1;2", "$((1))", "`id`",
    "abc", "None", "true", "nan", "inf", "-inf", "\u0663", "\uff13", "\u00b2", "\u2460", "18446744073709551618", "9" * 5000,
    "1" + "0" * 300,
    "{}", "[1]", "1\t", "\u200b1", "l", "O", "--", "NaN", "%d", "~", "*",
)  # fmt: skip
VARIABLES = ("NGPU", "NNODES", "NODE_RANK", "MAX_RESTARTS", "RDZV_TIMEOUT", "OMP_NUM_THREADS")
BELOW = {"NGPU": "0", "NNODES": "0", "RDZV_TIMEOUT": "0", "OMP_NUM_THREADS": "0", "NODE_RANK": "1"}
ABOVE = {"NGPU": "1025", "NNODES": "100001", "NODE_RANK": "100000", "MAX_RESTARTS": "1000001", "RDZV_TIMEOUT": "604801"}
ENDPOINTS = (
    "first", "first:", ":29500", "first:0", "first:65536", "first:029500", "first:-1", "first:abc", "first:29500:1",
    "fir st:29500", "first:29500 ", "http://first:29500", "first:\u0663", "a" * 254 + ":1", "[::1:29500", "first\n:29500",
    "first:1e3",
)  # fmt: skip
LOGGING = (
    "0,08", "00", "0,", ",0", ",", "0 3", "0, 1", "4", "0,4", "-1", "0;1", "1e0", "all", "\u0663", "18446744073709551618",
    "0" * 99,
)  # fmt: skip
RIGHT = (  # for four ranks, on one node or on two
    {}, {"NGPU": "4"}, {"NGPU": "4", "LOG_RANK": "0,3"}, {"NGPU": "4", "LOG_RANK": "3"}, {"NGPU": "", "LOG_RANK": ""},
    {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "first:29500"}, {"NNODES": "2", "RDZV_ENDPOINT": "[::1]:1"},
    {"NGPU": "1024"}, {"RDZV_TIMEOUT": "604800"}, {"MAX_RESTARTS": "0"}, {"OMP_NUM_THREADS": "3"},
)  # fmt: skip


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    one, *others = VARIABLES  # one function reads them all
    for name, text in [(one, text) for text in NOT_WHOLE] + [(name, draw.choice(NOT_WHOLE)) for name in others]:
        yield _refused(f"{name}={text[:20]!a}", {name: text}, name)
    for name, text in itertools.chain(BELOW.items(), ABOVE.items()):
        yield _refused(f"{name}={text}", {name: text}, name)
    for text in ENDPOINTS:
        yield _refused(f"RDZV_ENDPOINT={text[:20]!a}", {"NNODES": "2", "RDZV_ENDPOINT": text}, "RDZV_ENDPOINT")
    for text in LOGGING:
        yield _refused(f"LOG_RANK={text[:20]!a}", {"NGPU": "4", "LOG_RANK": text}, "LOG_RANK")
    yield _refused("two nodes that do not meet", {"NNODES": "2"}, "RDZV_ENDPOINT")
    for number, name in enumerate(draw.choices(VARIABLES, k=6)):
        text = "".join(draw.choices("0123456789_+-. ,xe\u0660", k=draw.randint(2, 30)))
        if layout.whole_number(text, 0, 10**6) is None:
            yield _refused(f"{name} drawn {number}", {name: text}, name)
    for name in ("RANK", "WORLD_SIZE"):
        for text in ("010", "-1", "abc", "18446744073709551618", "1e3"):
            yield Case(f"{name}={text} of a rank", _within({name: text}, process.rank_and_world), name)
    for number, variables in enumerate(RIGHT):
        yield Case(f"right {number}", _within(variables, layout.read_layout), "-", right=True)


def _refused(name: str, variables: dict[str, str], names: str) -> Case:
    return Case(name, _within(variables, _launch), f"{names}=")


def _launch() -> None:
    from titanlite.tools import launch

    with patch.object(sys, "argv", ["titanlite launch", "run.toml"]):
        launch.main()


def _within(variables: dict[str, str], action: Callable[[], object]) -> Callable[[Path], Callable[[], object]]:
    """The action as a command in an environment with only these variables of the launcher."""
    own = ("NGPU", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "LOG_RANK", "MAX_RESTARTS", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")

    def act() -> None:
        kept = {name: value for name, value in os.environ.items() if name not in own}
        with patch.dict(os.environ, kept | variables, clear=True):
            action()

    return lambda folder: act
