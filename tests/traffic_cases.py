"""Meshes and options whose traffic is tested on a fake process group (unit/test_plan.py) or on gloo (test_communication.py)."""

import math
from typing import Any, NamedTuple

from tests.distributed.scenarios import MODES, config_of
from titanlite.config.schema import Config


class Case(NamedTuple):
    """A mesh, and the special features of its step."""

    degrees: dict[str, int]
    flavor: str = "plain"
    accumulation: int = 1
    reduced: str = "none"  # what is recomputed
    name: str = "tests.tiny"
    parallelism: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    others: dict[str, dict[str, Any]] | None = None  # other sections

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.values())

    def config(self) -> Config:
        names = {
            "pp": "pipeline_parallel_degree",
            "dp_replicate": "data_parallel_replicate_degree",
            "dp_shard": "data_parallel_shard_degree",
            "cp": "context_parallel_degree",
            "tp": "tensor_parallel_degree",
        }
        return config_of(
            self.degrees,
            self.flavor,
            self.accumulation,
            model={"name": self.name},
            activation_checkpoint=MODES[self.reduced],
            parallelism={names[key]: degree for key, degree in self.degrees.items()} | (self.parallelism or {}),
            training=self.training or {},
            **(self.others or {}),
        )


HEADS = {"context_parallel_method": "ulysses"}
LATE = {"reduce_every_microbatch": False}
SHARD, TP, BOTH, HYBRID = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
HALF = {"mixed_precision_param": "bfloat16"}

MUON = {"optimizer": {"name": "Muon"}}
ADAPTERS = {"lora": {"enable": True, "rank": 4}}
FLOAT8 = {"float8": {"enable": True, "emulate": True}}
FLOAT8_GATHERS = {"float8": {**FLOAT8["float8"], "enable_fsdp_float8_all_gather": True}}

CASES = {
    "shard 2": Case(SHARD),
    "shard 4": Case({"dp_shard": 4}),
    "shard 2, accumulation, reduced once": Case(SHARD, accumulation=2, parallelism=LATE),
    "hybrid, accumulation": Case(HYBRID, accumulation=2),
    "hybrid, tied, accumulation": Case(HYBRID, "tied", accumulation=2),
    "hybrid, accumulation, reduced once": Case(HYBRID, accumulation=2, parallelism=LATE),
    "tp 4": Case({"tp": 4}),
    "tp 2, accumulation, reduced once, bfloat16": Case(TP, accumulation=2, parallelism=LATE, training=HALF),
    "tp 2, norms behind sublayers": Case(TP, name="tests.tiny_gemma3"),
    "2 x 2, tied": Case(BOTH, "tied"),
    "2 x 2, bfloat16, full recomputation": Case(BOTH, reduced="full", training=HALF),
    "vocabulary 515, 2 x 2": Case(BOTH, "uneven"),
}

# no formula gives their traffic
COUNTED = {
    "shard 2, four microbatches, reduced once": Case(SHARD, accumulation=4, parallelism=LATE),
    "2 x 2, Muon": Case(BOTH, "deep", others={"optimizer": {**MUON["optimizer"], "implementation": "for-loop"}}),
    "2 x 2, adapters, every second of four layers": Case(BOTH, "deep", reduced="every second layer", others=ADAPTERS),
    "tp 2, weights of features": Case(TP, name="tests.tiny_olmo2"),
    "tp 2, float8": Case(TP, others=FLOAT8),
    "shard 2, gathers in float8": Case(SHARD, others=FLOAT8_GATHERS),
    "context 2": Case({"cp": 2}),
    "context 4, heads exchanged, bfloat16": Case({"cp": 4}, parallelism=HEADS, training=HALF),
    "shard 2 x context 2, documents, full recomputation": Case(
        {"dp_shard": 2, "cp": 2}, reduced="full", training={"document_mask": True}
    ),
    "replicate 2 x context 2, tied, accumulation": Case({"dp_replicate": 2, "cp": 2}, "tied", accumulation=2),
    "context 2 x tp 2, windows and caps, recomputation by operation": Case(
        {"cp": 2, "tp": 2}, "two", reduced="per operation", name="tests.tiny_gemma3"
    ),
    "context 2 x tp 2, heads exchanged": Case({"cp": 2, "tp": 2}, parallelism=HEADS),
}

# From shapes and degrees, on the CPU: collective, mesh dimensions, ranks -> calls and bytes of the full tensors in a step.
EXPECTED: dict[str, dict[str, tuple[int, int]]] = {
    "shard 2": {
        "all-gather dp_shard 2": (6, 755_968),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 2, accumulation, reduced once": {
        "all-gather dp_shard 2": (12, 1_511_936),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "tp 4": {"all-gather tp 4": (11, 663_552), "all-reduce tp 4": (6, 1_284), "reduce-scatter tp 4": (10, 655_360)},
    "tp 2, accumulation, reduced once, bfloat16": {
        "all-gather tp 2": (22, 331_776),
        "all-reduce tp 2": (6, 1_284),
        "reduce-scatter tp 2": (20, 327_680),
    },
}
