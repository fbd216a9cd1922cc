"""Meshes and options whose traffic is tested on the fake process group (tests/unit/test_plan.py), and some also on gloo."""

import math
from typing import Any, NamedTuple

from tests.distributed.scenarios import MODES, config_of
from titanlite.config.schema import Config


class Case(NamedTuple):
    """A mesh, and what is special about the step on it."""

    degrees: dict[str, int]
    flavor: str = "plain"
    accumulation: int = 1
    reduced: str = "none"  # what is computed again
    name: str = "tests.tiny"
    parallelism: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    others: dict[str, dict[str, Any]] | None = None  # other sections

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.values())

    def config(self) -> Config:
        names = {
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
ALWAYS, NEVER = {"fsdp_reshard_after_forward": "always"}, {"fsdp_reshard_after_forward": "never"}
SHARD, TP, BOTH, HYBRID = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
HALF = {"mixed_precision_param": "bfloat16"}

MUON = {"optimizer": {"name": "Muon"}}
ADAPTERS = {"lora": {"enable": True, "rank": 4}}
FLOAT8 = {"float8": {"enable": True, "emulate": True}}
FLOAT8_GATHERS = {"float8": {**FLOAT8["float8"], "enable_fsdp_float8_all_gather": True}}

CASES = {
    "one process": Case({}),
    "shard 2": Case(SHARD),
    "shard 4": Case({"dp_shard": 4}),
    "shard 2, bfloat16": Case(SHARD, training=HALF),
    "shard 2, bfloat16 reduced in bfloat16": Case(SHARD, training={**HALF, "mixed_precision_reduce": "bfloat16"}),
    "shard 2, always reshard": Case(SHARD, parallelism=ALWAYS),
    "shard 2, never reshard": Case(SHARD, parallelism=NEVER),
    "shard 4, reshard to 2": Case({"dp_shard": 4}, parallelism={"fsdp_reshard_after_forward": 2}),
    "shard 4, four layers, prefetch 2": Case({"dp_shard": 4}, "deep", parallelism={"fsdp_prefetch": 2}),
    "shard 2, accumulation": Case(SHARD, accumulation=2),
    "shard 2, accumulation, never reshard": Case(SHARD, accumulation=2, parallelism=NEVER),
    "shard 2, accumulation, reduced once": Case(SHARD, accumulation=2, parallelism=LATE),
    "shard 2, full recomputation": Case(SHARD, reduced="full"),
    "shard 2, tied": Case(SHARD, "tied"),
    "shard 2, tied, always reshard": Case(SHARD, "tied", parallelism=ALWAYS),
    "shard 2, tied, never reshard": Case(SHARD, "tied", parallelism=NEVER),
    "shard 4, tied, reshard to 2": Case({"dp_shard": 4}, "tied", parallelism={"fsdp_reshard_after_forward": 2}),
    "shard 2, tied, accumulation, reduced once": Case(SHARD, "tied", accumulation=2, parallelism=LATE),
    "replicate 2": Case({"dp_replicate": 2}),
    "replicate 2, accumulation": Case({"dp_replicate": 2}, accumulation=2),
    "replicate 2, accumulation, reduced once": Case({"dp_replicate": 2}, accumulation=2, parallelism=LATE),
    "hybrid": Case(HYBRID),
    "hybrid, tied, bfloat16": Case(HYBRID, "tied", training=HALF),
    "hybrid, accumulation": Case(HYBRID, accumulation=2),
    "hybrid, tied, accumulation": Case(HYBRID, "tied", accumulation=2),
    "hybrid, accumulation, bfloat16": Case(HYBRID, accumulation=2, training={**HALF, "mixed_precision_reduce": "bfloat16"}),
    "hybrid, accumulation, reduced once": Case(HYBRID, accumulation=2, parallelism=LATE),
    "tp 2": Case(TP),
    "tp 4": Case({"tp": 4}),
    "tp 2, bfloat16": Case(TP, training=HALF),
    "tp 2, tied": Case(TP, "tied"),
    "tp 2, full recomputation": Case(TP, reduced="full"),
    "tp 2, recomputation by operation": Case(TP, reduced="per operation"),
    "tp 2, every second of four layers": Case(TP, "deep", reduced="every second layer"),
    "tp 2, accumulation": Case(TP, accumulation=2),
    "tp 2, accumulation, reduced once, bfloat16": Case(TP, accumulation=2, parallelism=LATE, training=HALF),
    "tp 2, norms behind sublayers": Case(TP, name="tests.tiny_gemma3"),
    "tp 2, norms behind sublayers, full recomputation": Case(TP, name="tests.tiny_gemma3", reduced="full"),
    "tp 2, biases": Case(TP, name="tests.tiny_biased"),
    "2 x 2": Case(BOTH),
    "2 x 2, tied": Case(BOTH, "tied"),
    "2 x 2, bfloat16, full recomputation": Case(BOTH, reduced="full", training=HALF),
    "2 x 2, accumulation, reduced once": Case(BOTH, accumulation=2, parallelism=LATE),
    "replicate 2 x tp 2": Case({"dp_replicate": 2, "tp": 2}),
    "vocabulary 515, 2 x 2": Case(BOTH, "uneven"),
    "vocabulary 515, shard 4": Case({"dp_shard": 4}, "uneven"),
}

# whose traffic no formula gives
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

# From shapes and degrees, on the CPU: collective, mesh dimensions, ranks -> calls and bytes of the whole tensors in a step.
EXPECTED: dict[str, dict[str, tuple[int, int]]] = {
    "one process": {},
    "shard 2": {
        "all-gather dp_shard 2": (6, 755_968),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 4": {
        "all-gather dp_shard 4": (6, 755_968),
        "all-reduce dp_shard 4": (2, 12),
        "reduce-scatter dp_shard 4": (4, 509_184),
    },
    "shard 2, bfloat16": {
        "all-gather dp_shard 2": (6, 377_984),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 2, bfloat16 reduced in bfloat16": {
        "all-gather dp_shard 2": (6, 377_984),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 254_592),
    },
    "shard 2, always reshard": {
        "all-gather dp_shard 2": (7, 887_296),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 2, never reshard": {
        "all-gather dp_shard 2": (4, 509_184),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 4, reshard to 2": {
        "all-gather dp_shard 2": (3, 378_112),
        "all-gather dp_shard 4": (4, 509_184),
        "all-reduce dp_shard 4": (2, 12),
        "reduce-scatter dp_shard 4": (4, 509_184),
    },
    "shard 4, four layers, prefetch 2": {
        "all-gather dp_shard 4": (10, 1_249_536),
        "all-reduce dp_shard 4": (2, 12),
        "reduce-scatter dp_shard 4": (6, 755_968),
    },
    "shard 2, accumulation": {
        "all-gather dp_shard 2": (12, 1_511_936),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (8, 1_018_368),
    },
    "shard 2, accumulation, never reshard": {
        "all-gather dp_shard 2": (8, 1_018_368),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (8, 1_018_368),
    },
    "shard 2, accumulation, reduced once": {
        "all-gather dp_shard 2": (12, 1_511_936),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 2, full recomputation": {
        "all-gather dp_shard 2": (6, 755_968),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "shard 2, tied": {
        "all-gather dp_shard 2": (5, 624_896),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 378_112),
    },
    "shard 2, tied, always reshard": {
        "all-gather dp_shard 2": (7, 887_552),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 378_112),
    },
    "shard 2, tied, never reshard": {
        "all-gather dp_shard 2": (3, 378_112),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 378_112),
    },
    "shard 4, tied, reshard to 2": {
        "all-gather dp_shard 2": (3, 378_112),
        "all-gather dp_shard 4": (4, 509_440),
        "all-reduce dp_shard 4": (2, 12),
        "reduce-scatter dp_shard 4": (4, 378_112),
    },
    "shard 2, tied, accumulation, reduced once": {
        "all-gather dp_shard 2": (10, 1_249_792),
        "all-reduce dp_shard 2": (2, 12),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "replicate 2": {"all-reduce dp_replicate 2": (6, 509_196)},
    "replicate 2, accumulation": {"all-reduce dp_replicate 2": (6, 509_196)},
    "replicate 2, accumulation, reduced once": {"all-reduce dp_replicate 2": (6, 509_196)},
    "hybrid": {
        "all-gather dp_shard 2": (6, 755_968),
        "all-reduce dp_replicate 2": (5, 254_600),
        "all-reduce dp_replicate x dp_shard 4": (1, 4),
        "all-reduce dp_shard 2": (1, 8),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "hybrid, tied, bfloat16": {
        "all-gather dp_shard 2": (5, 312_448),
        "all-reduce dp_replicate 2": (5, 189_064),
        "all-reduce dp_replicate x dp_shard 4": (1, 4),
        "all-reduce dp_shard 2": (1, 8),
        "reduce-scatter dp_shard 2": (4, 378_112),
    },
    "hybrid, accumulation": {
        "all-gather dp_shard 2": (12, 1_511_936),
        "all-reduce dp_replicate 2": (5, 254_600),
        "all-reduce dp_replicate x dp_shard 4": (1, 4),
        "all-reduce dp_shard 2": (1, 8),
        "reduce-scatter dp_shard 2": (8, 1_018_368),
    },
    "hybrid, tied, accumulation": {
        "all-gather dp_shard 2": (10, 1_249_792),
        "all-reduce dp_replicate 2": (7, 254_728),
        "all-reduce dp_replicate x dp_shard 4": (1, 4),
        "all-reduce dp_shard 2": (1, 8),
        "reduce-scatter dp_shard 2": (8, 756_224),
    },
    "hybrid, accumulation, bfloat16": {
        "all-gather dp_shard 2": (12, 755_968),
        "all-reduce dp_replicate 2": (9, 254_600),
        "all-reduce dp_replicate x dp_shard 4": (1, 4),
        "all-reduce dp_shard 2": (1, 8),
        "reduce-scatter dp_shard 2": (8, 509_184),
    },
    "hybrid, accumulation, reduced once": {
        "all-gather dp_shard 2": (12, 1_511_936),
        "all-reduce dp_replicate 2": (5, 254_600),
        "all-reduce dp_replicate x dp_shard 4": (1, 4),
        "all-reduce dp_shard 2": (1, 8),
        "reduce-scatter dp_shard 2": (4, 509_184),
    },
    "tp 2": {"all-gather tp 2": (11, 659_456), "all-reduce tp 2": (6, 1_284), "reduce-scatter tp 2": (10, 655_360)},
    "tp 4": {"all-gather tp 4": (11, 663_552), "all-reduce tp 4": (6, 1_284), "reduce-scatter tp 4": (10, 655_360)},
    "tp 2, bfloat16": {"all-gather tp 2": (11, 331_776), "all-reduce tp 2": (6, 644), "reduce-scatter tp 2": (10, 327_680)},
    "tp 2, tied": {"all-gather tp 2": (11, 659_456), "all-reduce tp 2": (6, 1_284), "reduce-scatter tp 2": (10, 655_360)},
    "tp 2, full recomputation": {
        "all-gather tp 2": (15, 921_600),
        "all-reduce tp 2": (6, 1_284),
        "reduce-scatter tp 2": (12, 786_432),
    },
    "tp 2, recomputation by operation": {
        "all-gather tp 2": (15, 921_600),
        "all-reduce tp 2": (6, 1_284),
        "reduce-scatter tp 2": (10, 655_360),
    },
    "tp 2, every second of four layers": {
        "all-gather tp 2": (23, 1_445_888),
        "all-reduce tp 2": (10, 2_308),
        "reduce-scatter tp 2": (20, 1_310_720),
    },
    "tp 2, accumulation": {
        "all-gather tp 2": (22, 659_456),
        "all-reduce tp 2": (11, 2_564),
        "reduce-scatter tp 2": (20, 655_360),
    },
    "tp 2, accumulation, reduced once, bfloat16": {
        "all-gather tp 2": (22, 331_776),
        "all-reduce tp 2": (6, 1_284),
        "reduce-scatter tp 2": (20, 327_680),
    },
    "tp 2, norms behind sublayers": {
        "all-gather tp 2": (19, 1_183_744),
        "all-reduce tp 2": (26, 4_868),
        "reduce-scatter tp 2": (18, 1_179_648),
    },
    "tp 2, norms behind sublayers, full recomputation": {
        "all-gather tp 2": (27, 1_708_032),
        "all-reduce tp 2": (26, 4_868),
        "reduce-scatter tp 2": (26, 1_703_936),
    },
    "tp 2, biases": {"all-gather tp 2": (11, 659_456), "all-reduce tp 2": (6, 1_284), "reduce-scatter tp 2": (10, 655_360)},
    "2 x 2": {
        "all-gather dp_shard 2": (6, 379_136),
        "all-gather tp 2": (11, 329_728),
        "all-reduce dp_shard 2": (1, 8),
        "all-reduce dp_shard x tp 4": (1, 4),
        "all-reduce tp 2": (5, 1_280),
        "reduce-scatter dp_shard 2": (4, 255_232),
        "reduce-scatter tp 2": (10, 327_680),
    },
    "2 x 2, tied": {
        "all-gather dp_shard 2": (5, 313_600),
        "all-gather tp 2": (11, 329_728),
        "all-reduce dp_shard 2": (1, 8),
        "all-reduce dp_shard x tp 4": (1, 4),
        "all-reduce tp 2": (5, 1_280),
        "reduce-scatter dp_shard 2": (4, 189_696),
        "reduce-scatter tp 2": (10, 327_680),
    },
    "2 x 2, bfloat16, full recomputation": {
        "all-gather dp_shard 2": (6, 189_568),
        "all-gather tp 2": (15, 231_424),
        "all-reduce dp_shard 2": (1, 8),
        "all-reduce dp_shard x tp 4": (1, 4),
        "all-reduce tp 2": (5, 640),
        "reduce-scatter dp_shard 2": (4, 255_232),
        "reduce-scatter tp 2": (12, 196_608),
    },
    "2 x 2, accumulation, reduced once": {
        "all-gather dp_shard 2": (12, 758_272),
        "all-gather tp 2": (22, 329_728),
        "all-reduce dp_shard 2": (1, 8),
        "all-reduce dp_shard x tp 4": (1, 4),
        "all-reduce tp 2": (5, 1_280),
        "reduce-scatter dp_shard 2": (4, 255_232),
        "reduce-scatter tp 2": (20, 327_680),
    },
    "replicate 2 x tp 2": {
        "all-gather tp 2": (11, 329_728),
        "all-reduce dp_replicate 2": (5, 255_240),
        "all-reduce dp_replicate x tp 4": (1, 4),
        "all-reduce tp 2": (5, 1_280),
        "reduce-scatter tp 2": (10, 327_680),
    },
    "vocabulary 515, 2 x 2": {
        "all-gather dp_shard 2": (6, 380_160),
        "all-gather tp 2": (11, 329_728),
        "all-reduce dp_shard 2": (1, 8),
        "all-reduce dp_shard x tp 4": (1, 4),
        "all-reduce tp 2": (5, 1_280),
        "reduce-scatter dp_shard 2": (4, 256_256),
        "reduce-scatter tp 2": (10, 327_680),
    },
    "vocabulary 515, shard 4": {
        "all-gather dp_shard 4": (6, 758_016),
        "all-reduce dp_shard 4": (2, 12),
        "reduce-scatter dp_shard 4": (4, 511_232),
    },
}
