"""Functions of whole matrices: each rank gathers some of the matrices, computes, and returns the shards of the results.

Each of N ranks owns every N-th matrix. For N matrices at a time, one all-to-all sends the shards to the owners, and another
returns the shards of the results. So no matrix is computed twice, not even one with replicas; no rank holds more than one whole
matrix; and each rank sends and receives about as much as its shards of the matrices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.transforms.shards import boxes_of_ranks


class Box(NamedTuple):
    """The part of a matrix that a rank holds."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.row : self.row + self.rows, self.column : self.column + self.columns]


class Round(NamedTuple):
    """The exchange of up to N matrices, from this rank's view; rank j owns matrix j of them."""

    matrices: list[int]
    sent: list[int]  # how many values this rank sends to each owner
    gathered: list[tuple[int, Box]]  # source rank and box of what this rank receives: together they are its matrix
    returned: list[Box]  # the box of each rank in this rank's matrix
    mine: list[Box]  # this rank's box in each of the matrices


class Exchange:
    """The rounds for the same matrices at every step. All ranks construct it, and call `map`, together.

    matrices: two-dimensional parameters, DTensors on any meshes or plain tensors that every rank holds whole.
    """

    def __init__(self, matrices: list[Tensor]):
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._boxes = _boxes_of_ranks(matrices, self._world)
        self._rounds: tuple[list[int], list[Round]] = [], []

    def rounds(self, used: list[int]) -> list[Round]:
        """Groups the matrices of a step into rounds, by shape, so that owners have equal work."""
        if self._rounds[0] != used:
            ordered = sorted(used, key=lambda number: self._shapes[number])
            groups = [ordered[first : first + self._world] for first in range(0, len(ordered), self._world)]
            self._rounds = list(used), [self._planned(group) for group in groups]
        return self._rounds[1]

    def _planned(self, group: list[int]) -> Round:
        me = dist.get_rank() if self._world > 1 else 0
        mine = [self._boxes[number][me] for number in group]
        senders = [self._senders(number, owner) for owner, number in enumerate(group)]
        sent = [mine[owner].size if me in senders[owner] else 0 for owner in range(len(group))]
        sent += [0] * (self._world - len(group))
        if me >= len(group):
            return Round(group, sent, [], [], mine)
        gathered = [(rank, self._boxes[group[me]][rank]) for rank in sorted(senders[me])]
        return Round(group, sent, gathered, self._boxes[group[me]], mine)

    def _senders(self, number: int, owner: int) -> set[int]:
        """The ranks that send the owner their part of a matrix: of several with the same part, the nearest one."""
        nearest: dict[Box, int] = {}
        for rank, box in enumerate(self._boxes[number]):
            if box.size and (box not in nearest or abs(rank - owner) < abs(nearest[box] - owner)):
                nearest[box] = rank
        return set(nearest.values())

    def map(self, one: Round, shards: list[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's parts of function(whole matrix), for the matrices of a round; shards: its parts of the matrices."""
        if self._world == 1:
            return [function(shard) for shard in shards]
        kind, rank = shards[0], dist.get_rank()
        counts = [0] * self._world
        for sender, box in one.gathered:
            counts[sender] = box.size
        sending = [shard.flatten() for shard, count in zip(shards, one.sent, strict=False) if count]
        received = _all_to_all(sending, one.sent, counts, kind)
        back: list[Tensor] = []
        if one.gathered:
            whole = kind.new_empty(self._shapes[one.matrices[rank]])
            for values, (_, box) in zip(received.split([box.size for _, box in one.gathered]), one.gathered, strict=True):
                box.of(whole).copy_(values.view(box.rows, box.columns))
            result = function(whole)
            back = [box.of(result).flatten() for box in one.returned]
        sizes = [box.size for box in one.returned] or [0] * self._world
        expected = [box.size for box in one.mine]
        parts = _all_to_all(back, sizes, expected + [0] * (self._world - len(expected)), kind)
        return [part.view(box.rows, box.columns) for part, box in zip(parts.split(expected), one.mine, strict=True)]


def _boxes_of_ranks(matrices: list[Tensor], world: int) -> list[list[Box]]:
    """For each matrix the box of every rank."""
    layouts: dict[Any, list[Box]] = {}  # most matrices are of a few shapes, split alike
    found = []
    for matrix in matrices:
        if not isinstance(matrix, DTensor):
            found.append([Box(0, 0, *matrix.shape)] * world)
            continue
        layout = tuple(matrix.shape), matrix.device_mesh, tuple(matrix.placements)
        if layout not in layouts:
            boxes = boxes_of_ranks(matrix)
            layouts[layout] = [Box(*offset, *shape) for shape, offset in (boxes[rank] for rank in range(world))]
        found.append(layouts[layout])
    return found


def _all_to_all(sending: list[Tensor], sent: list[int], received: list[int], kind: Tensor) -> Tensor:
    """The values that all ranks sent to this one, in rank order. sent, received: how many for and from each rank."""
    output = kind.new_empty(sum(received))
    dist.all_to_all_single(output, torch.cat(sending) if sending else kind.new_empty(0), received, sent)
    return output
