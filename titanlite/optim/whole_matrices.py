"""Functions of whole matrices: each rank gathers some of the matrices, computes, and returns the shards of the results.

Each of N ranks owns every N-th matrix. For N matrices at a time, one all-to-all sends the shards to the owners, and another
returns the shards of the results. So no matrix is computed twice, not even one with replicas; no rank holds more than one whole
matrix; and each rank sends and receives about as much as its shards of the matrices.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from titanlite.ground.torch_private import compute_shape_and_offset_at, disable_current_modes


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


NOTHING = Box(0, 0, 0, 0)


class Bucket(NamedTuple):
    """The all-to-alls of up to N matrices, from this rank's view; rank j owns matrix j of them, or an empty one."""

    matrices: list[int]
    shape: tuple[int, ...]  # of the matrix that this rank owns
    sent: list[int]  # how many values this rank sends to each owner
    gathered: list[Box]  # what each rank sends to this one: together they are its matrix
    returned: list[Box]  # the box of each rank in this rank's matrix
    mine: list[Box]  # this rank's box in each owner's matrix


class Redistribution:
    """The buckets for the same matrices at every step. All ranks of a group construct it, and call `map`, together.

    matrices: two-dimensional parameters, DTensors on any meshes or plain tensors that every rank holds whole.
    """

    def __init__(self, matrices: list[Tensor], group: dist.ProcessGroup | None = None):
        self._shapes, self._group = [tuple(matrix.shape) for matrix in matrices], group
        self._rank, self._world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self._boxes = [_boxes(matrix, self._world) for matrix in matrices]
        self._buckets: tuple[list[int], list[Bucket]] = [], []

    def buckets(self, used: list[int]) -> list[Bucket]:
        """Groups the matrices of a step into buckets, by shape, so that owners have equal work."""
        if self._buckets[0] != used:
            ordered = sorted(used, key=lambda number: self._shapes[number])
            groups = [ordered[first : first + self._world] for first in range(0, len(ordered), self._world)]
            self._buckets = list(used), [self._planned(group) for group in groups]
        return self._buckets[1]

    def _planned(self, group: list[int]) -> Bucket:
        me, idle = self._rank, self._world - len(group)
        shapes = [self._shapes[number] for number in group] + [(0, 0)] * idle
        boxes = [self._boxes[number] for number in group] + [[NOTHING] * self._world] * idle
        senders = [_senders(of_ranks, owner) for owner, of_ranks in enumerate(boxes)]
        mine = [of_ranks[me] for of_ranks in boxes]
        sent = [box.size if me in senders[owner] else 0 for owner, box in enumerate(mine)]
        gathered = [box if rank in senders[me] else NOTHING for rank, box in enumerate(boxes[me])]
        return Bucket(group, shapes[me], sent, gathered, boxes[me], mine)

    def map(self, one: Bucket, shards: list[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's parts of function(whole matrix), for the matrices of a bucket; shards: its parts of the matrices."""
        if self._world == 1:
            return [function(shard) for shard in shards]
        sending = torch.cat([shard.flatten()[:count] for shard, count in zip(shards, one.sent, strict=False)])
        whole = sending.new_empty(one.shape)
        for box, part in zip(one.gathered, self._all_to_all(sending, one.sent, one.gathered), strict=True):
            box.of(whole).copy_(part)
        result = function(whole) if whole.numel() else whole
        back = torch.cat([box.of(result).flatten() for box in one.returned])
        return self._all_to_all(back, [box.size for box in one.returned], one.mine)[: len(shards)]

    def _all_to_all(self, values: Tensor, sent: list[int], received: list[Box]) -> list[Tensor]:
        """The boxes that all ranks sent to this one. sent: how many of `values` are for each rank."""
        sizes = [box.size for box in received]
        output = values.new_empty(sum(sizes))
        dist.all_to_all_single(output, values, sizes, sent, group=self._group)
        return [part.view(box.rows, box.columns) for part, box in zip(output.split(sizes), received, strict=True)]


def _senders(boxes: list[Box], owner: int) -> set[int]:
    """The ranks that send the owner their part of a matrix: of several with the same part, the nearest one."""
    nearest: dict[Box, int] = {}
    for rank, box in enumerate(boxes):
        if box.size and (box not in nearest or abs(rank - owner) < abs(nearest[box] - owner)):
            nearest[box] = rank
    return set(nearest.values())


def _boxes(matrix: Tensor, world: int) -> list[Box]:
    """The box of every rank."""
    if not isinstance(matrix, DTensor):
        return [Box(0, 0, *matrix.shape)] * world
    with disable_current_modes():  # meshes are compared and read as tensors, which must be real also in FakeTensorMode
        return _boxes_of_layout(tuple(matrix.shape), matrix.device_mesh, tuple(matrix.placements))


@functools.cache  # most matrices are of a few shapes, split alike
def _boxes_of_layout(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[Box]:
    """The box of every rank in a DTensor. It follows from the placements: nothing is sent."""
    boxes = {}
    coordinates = itertools.product(*map(range, mesh.shape))
    for rank, coordinate in zip(mesh.mesh.flatten().tolist(), coordinates, strict=True):
        local, offset = compute_shape_and_offset_at(shape, mesh.shape, list(coordinate), placements)
        boxes[rank] = Box(*offset, *local)
    return [boxes[rank] for rank in sorted(boxes)]
