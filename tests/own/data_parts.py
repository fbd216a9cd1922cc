"""Own data that only the tests need: endless, poisoned, different on each rank, or wrong in one of many ways."""

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from tests import tiny_poison
from tests.own.parts import Sums, Walks


class Endless:
    """Its samples are their numbers, as two digits of 10 bits each."""

    def read(self, i: int):
        return [i % 1024 // 4, i // 1024]


class Fixed(Walks):
    """Walks for a fixed number of data ranks."""

    reshard = None


class Node(BaseNode):
    """Walks as a node of torchdata."""

    def __init__(self, seq_len: int, rank: int, degree: int):
        super().__init__()
        self.walks = Walks(seq_len, rank, degree)

    def reset(self, initial_state=None):
        super().reset(initial_state)
        if initial_state is not None:
            self.walks.load_state_dict(initial_state)
        self.rows = iter(self.walks)

    def next(self):
        return next(self.rows)

    def get_state(self):
        return self.walks.state_dict()


class Heavy(Walks):
    """Walks with a state larger than a pipe holds."""

    def state_dict(self):
        return {"rows": self.rows, "weight": "x" * 1_000_000}


class Poisoned(Walks):
    """Walks whose 49th row on the first data rank spoils its batch: the first of step 7 on one rank."""

    def __iter__(self):
        for row in super().__iter__():
            yield np.full_like(row, tiny_poison.OF_LOSS) if (self.rank, self.rows) == (0, 49) else (row + 20)


class OfTheRank(Sums):
    """Sums that differ from rank to rank."""

    def read(self, i: int):
        return super().read(i + dist.get_rank())


class Wrong:
    """A map with the fault `way`."""

    def __init__(self, way: str, seq_len: int):
        self.way, self.seq_len, self.random = way, seq_len, np.random.default_rng()
        assert way != "assertion"

    def __len__(self) -> int:
        return 0 if self.way == "empty" else 10

    def read(self, i: int):
        length = self.seq_len + 1
        return {
            "raises": lambda: 1 // (i * 0),
            "id": lambda: [*range(length - 1), 10**6],
            "negative": lambda: [-1] * length,
            "long": lambda: [1] * (length + 1),
            "empty row": list,
            "floats": lambda: np.ones(length),
            "text": lambda: "text",
            "short mask": lambda: ([1] * length, [True]),
            "mask of numbers": lambda: ([1] * length, [1] * length),
            "falling ends": lambda: ([1] * length, None, [5, 3]),
            "broken ends": lambda: ([1] * length, None, [2.5]),
            "not pure": lambda: self.random.integers(100, size=length),
            "short": lambda: [1] * (length - 2),  # the last input is padding
            "inputs": lambda: [1] * (length - 1),  # no input is padding
            "no labels": lambda: ([1] * length, [False] * length),
        }[self.way]()


class WrongStream(IterableDataset):
    """A stream with the fault `way`."""

    def __init__(self, way: str, rank: int, degree: int):
        self.way, self.rows = way, 0

    def __iter__(self):
        while self.way != "ends" or self.rows < 2:
            if self.way == "raises" and self.rows == 2:
                raise RuntimeError("no more")
            self.rows += self.way != "late"
            yield [self.rows] * 5
            self.rows += self.way == "late"

    def state_dict(self):
        strange = {"numpy": np.int64(3), "keys": {1: 2}, "nan": float("nan"), "digits": 1 << 256}
        value = "x" * 40_000_000 if self.way == "large" else strange.get(self.way, 0)
        return {"rows": self.rows, "more": [{"value": value}]}

    def load_state_dict(self, state):
        self.rows = state["rows"]
        if self.way == "cannot load":
            raise KeyError("place")


class Stateless(IterableDataset):
    """A stream without a state."""

    def __init__(self, rank: int, degree: int):
        pass

    def __iter__(self):
        return iter([[1, 2, 3]])


class Unready:
    """A map without `read`."""


number = 3
