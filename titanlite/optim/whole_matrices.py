"""Functions of whole matrices: each rank gathers some of the matrices, computes, and returns the shards of the results.

Each of N ranks owns an N-th of the matrices; a stack of experts is as many matrices. For N of them at a time, or for more in a
stack, one all-to-all sends the shards to the owners, and another returns the shards of the results. So no matrix is computed
twice, not even one with replicas; a rank holds one whole matrix, or an N-th of a stack; and each rank sends and receives about
as much as its shards of the matrices. Where each expert of a stack is whole on one rank, and on no other, nothing is sent.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from titanlite.ground.torch_private import compute_shape_and_offset_at, disable_current_modes


class Box(NamedTuple):
    """A part of a stack: where it begins and how long it is in each dimension, (matrices, rows, columns). A matrix is a stack
    of one."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(first, first + count) for first, count in zip(self.offset, self.shape, strict=True))]

    def within(self, other: "Box") -> "Box":
        """What both have in common, as a part of the other one."""
        spans = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        shared = [(max(a, b), min(a + m, b + n)) for a, m, b, n in spans]
        offset = tuple(first - b for (first, _), b in zip(shared, other.offset, strict=True))
        return Box(offset, tuple(max(0, last - first) for first, last in shared))


class Part(NamedTuple):
    """A box of one of several tensors."""

    tensor: int
    box: Box


class Bucket(NamedTuple):
    """The all-to-alls of up to N matrices, or of more in a stack, from this rank's view."""

    parameters: list[int]
    local: bool = True  # every rank holds what it owns: nothing is sent
    owned: Sequence[Part] = ()  # the whole matrices that this rank computes, by the index of their parameter
    # for each rank
    sent: Sequence[list[Part]] = ()  # this rank's shards, by parameter, that it sends to that owner
    gathered: Sequence[list[Part]] = ()  # what it sends to this one: together they are what this one owns
    returned: Sequence[list[Part]] = ()  # its parts of what this rank owns
    mine: Sequence[list[Part]] = ()  # this rank's parts, by parameter, of what it owns


class Redistribution:
    """The buckets for the same parameters at every step. All ranks of a group construct it, and call `map`, together.

    parameters: matrices, or stacks (experts, rows, columns): DTensors on any meshes, or plain tensors that every rank holds
    whole.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup | None = None):
        self._group, self._wholes = group, [_as_stack(tuple(each.shape), 1) for each in parameters]
        self._rank, self._world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self._boxes = [_boxes(each, self._world) for each in parameters]
        self._buckets: tuple[list[int], list[Bucket]] = [], []

    def buckets(self, used: list[int]) -> list[Bucket]:
        """Groups the parameters of a step into buckets, by the shape of their matrices, so that owners have equal work."""
        if self._buckets[0] != used:
            buckets: list[Bucket] = []
            waiting: list[int] = []
            for number in sorted(used, key=lambda number: self._wholes[number][1:]):
                if self._is_local(number):
                    buckets.append(Bucket([number]))
                    continue
                waiting.append(number)
                if sum(self._wholes[each][0] for each in waiting) >= self._world:
                    buckets.append(self._planned(waiting))
                    waiting = []
            self._buckets = list(used), buckets + ([self._planned(waiting)] if waiting else [])
        return self._buckets[1]

    def _is_local(self, number: int) -> bool:
        """Whether each of a parameter's matrices is whole on one rank, and on no other."""
        (count, *size), boxes = self._wholes[number], self._boxes[number]
        return all([*box.shape[1:]] == size for box in boxes) and sum(box.shape[0] for box in boxes) == count

    def _owned(self, parameters: list[int], owner: int) -> list[Part]:
        """What a rank owns of the matrices of these parameters: equal runs, and the last ranks less."""
        counts = [self._wholes[number][0] for number in parameters]
        each = math.ceil(sum(counts) / self._world)
        owned, begin = [], 0
        for index, count in enumerate(counts):
            first, last = max(each * owner - begin, 0), min(each * (owner + 1) - begin, count)
            if first < last:
                owned.append(Part(index, Box((first, 0, 0), (last - first, *self._wholes[parameters[index]][1:]))))
            begin += count
        return owned

    def _planned(self, parameters: list[int]) -> Bucket:
        me, ranks, boxes = self._rank, range(self._world), [self._boxes[number] for number in parameters]
        owned = [self._owned(parameters, owner) for owner in ranks]
        mine = [[Part(index, box.within(boxes[index][me])) for index, box in parts] for parts in owned]
        sent = [[p for p in mine[owner] if p.box.size and me in _senders(boxes[p.tensor], owner)] for owner in ranks]
        senders = [_senders(boxes[index], me) for index, _ in owned[me]]
        theirs = [[Part(at, boxes[index][rank].within(box)) for at, (index, box) in enumerate(owned[me])] for rank in ranks]
        gathered = [[part for part in theirs[rank] if rank in senders[part.tensor]] for rank in ranks]
        return Bucket(parameters, False, owned[me], sent, gathered, theirs, mine)

    def map(self, one: Bucket, shards: list[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's shards of function(whole matrices), for the parameters of a bucket; shards: its shards of them.

        function: of (matrices, rows, columns), each matrix on its own, to the same shape.
        """
        stacks = [shard.view(_as_stack(tuple(shard.shape), 1)) for shard in shards]
        if one.local:
            results = [function(stack) if stack.numel() else stack for stack in stacks]
        else:
            wholes, results = [stacks[0].new_empty(part.box.shape) for part in one.owned], [torch.empty_like(s) for s in stacks]
            self._all_to_all(_views(one.sent, stacks), _views(one.gathered, wholes), stacks[0])
            computed = [function(whole) for whole in wholes]
            self._all_to_all(_views(one.returned, computed), _views(one.mine, results), stacks[0])
        return [result.view(shard.shape) for result, shard in zip(results, shards, strict=True)]

    def _all_to_all(self, sources: list[list[Tensor]], targets: list[list[Tensor]], like: Tensor) -> None:
        """Sends the sources of each rank to it, and writes what it sends to its targets."""
        sent, received = ([sum(tensor.numel() for tensor in tensors) for tensors in each] for each in (sources, targets))
        flat = [tensor.flatten() for tensors in sources for tensor in tensors]
        values, output = torch.cat([like.new_empty(0), *flat]), like.new_empty(sum(received))
        dist.all_to_all_single(output, values, received, sent, group=self._group)
        every = [tensor for tensors in targets for tensor in tensors]
        for target, part in zip(every, output.split([target.numel() for target in every]), strict=True):
            target.copy_(part.view(target.shape))


def _views(of_ranks: Sequence[list[Part]], tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[box.of(tensors[index]) for index, box in parts if box.size] for parts in of_ranks]


def _as_stack(values: tuple[int, ...], first: int) -> tuple[int, ...]:
    """A shape or an offset of a matrix as one of a stack; those of a stack as they are."""
    return values if len(values) == 3 else (first, *values)


def _senders(boxes: list[Box], owner: int) -> set[int]:
    """The ranks that send the owner their part of a parameter: of several with the same part, the nearest one."""
    nearest: dict[Box, int] = {}
    for rank, box in enumerate(boxes):
        if box.size and (box not in nearest or abs(rank - owner) < abs(nearest[box] - owner)):
            nearest[box] = rank
    return set(nearest.values())


def _boxes(parameter: Tensor, world: int) -> list[Box]:
    """The box of every rank."""
    if not isinstance(parameter, DTensor):
        return [Box((0, 0, 0), _as_stack(tuple(parameter.shape), 1))] * world
    with disable_current_modes():  # meshes are compared and read as tensors, which must be real also in FakeTensorMode
        return _boxes_of_layout(tuple(parameter.shape), parameter.device_mesh, tuple(parameter.placements))


@functools.cache  # most parameters are of a few shapes, split alike
def _boxes_of_layout(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[Box]:
    """The box of every rank in a DTensor. It follows from the placements: nothing is sent."""
    boxes = {}
    coordinates = itertools.product(*map(range, mesh.shape))
    for rank, coordinate in zip(mesh.mesh.flatten().tolist(), coordinates, strict=True):
        local, offset = compute_shape_and_offset_at(shape, mesh.shape, list(coordinate), placements)
        boxes[rank] = Box(_as_stack(tuple(offset), 0), _as_stack(tuple(local), 1))
    return [boxes[rank] for rank in sorted(boxes)]
