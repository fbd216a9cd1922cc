"""A fork with three heads, which two ranks cannot share equally, although they could split the matrices."""

import dataclasses

from tests.tiny import FLAVORS as SIZES
from tests.tiny import Config, Model, flops, initial, sharding

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

FLAVORS = {"plain": dataclasses.replace(SIZES["plain"], n_heads=3, n_kv_heads=3)}
