"""The cells of test_cuda_shim.py: configurations that run on a simulated GPU. Imports no torch."""

from typing import Any, NamedTuple

Sections = dict[str, dict[str, Any]]

MESHES: dict[str, dict[str, int]] = {
    "1 rank": {},
    "FSDP 8": {"dp_shard": 8},
    "FSDP 4 x TP 2": {"dp_shard": 4, "tp": 2},
    "HSDP 2 x 4": {"dp_replicate": 2, "dp_shard": 4},
    "CP 8, gather": {"cp": 8},
    # without TP: DTensor caches the group of another mesh's equal dimension, and all cells share a process
    "FSDP 4 x CP 2, ulysses": {"dp_shard": 4, "cp": 2},
    "FSDP 8, EP 4": {"dp_shard": 8, "ep": 4},
    "FSDP 4 x TP 2, EP 8": {"dp_shard": 4, "tp": 2, "ep": 8},
    # the first rank has the embedding, the last one the head
    "PP 2 x FSDP 4, 1F1B, first rank": {"pp": 2, "dp_shard": 4},
    "PP 2 x FSDP 4, 1F1B, last rank": {"pp": 2, "dp_shard": 4},
    "PP 2 x FSDP 4, Interleaved1F1B, last rank": {"pp": 2, "dp_shard": 4},
    "PP 2 x FSDP 2 x TP 2, Interleaved1F1B, first rank": {"pp": 2, "dp_shard": 2, "tp": 2},
    "PP 2 x FSDP 4, EP 4, Interleaved1F1B, first rank": {"pp": 2, "dp_shard": 4, "ep": 4},
}


class Variant(NamedTuple):
    """What runs on each mesh, by default in bfloat16, and what is decided only on a GPU."""

    sections: Sections
    runs: tuple[str, ...] = ()  # operations that its step must run
    attention: tuple[str, ...] = ("cudnn",)  # the attention kernels that its step must run, and no others
    passes: int = 1  # forward passes of a block for each microbatch, including recomputation


_FLOAT32: Sections = {"training": {"mixed_precision_param": "float32"}}
_NARROW: Sections = {"training": {"dtype": "bfloat16"}}
_MASKED: Sections = {"training": {"document_mask": True}}
_COMPILED: Sections = {"compile": {"enable": True, "backend": "aot_eager"}}
_GEMMA: Sections = {"model": {"name": "tests.tiny_gemma3"}}
_FLOAT8: Sections = {"float8": {"enable": True}}
_OFFLOADED = ("a copy of 3 dimensions from cuda to cpu", "a copy of 3 dimensions from cpu to cuda")
_SCALED = ("aten._scaled_mm.default",)
_MIXTURE: Sections = {
    "model": {"name": "tests.tiny_moe"},
    "moe": {"bias_update_speed": 1e-3, "balance_loss": 1e-4, "router_z_loss": 1e-3},
}
_GROUPED = ("aten._grouped_mm.default",)


def _recompute(**keys: Any) -> Sections:
    return {"activation_checkpoint": keys}


def _optimizer(**keys: Any) -> Sections:
    return {"optimizer": keys}


VARIANTS: dict[str, Variant] = {
    "float32": Variant(_FLOAT32, attention=("efficient",)),
    "bfloat16": Variant({}, ("aten._fused_adamw_.default",)),
    "float16": Variant({"training": {"mixed_precision_param": "float16"}}, ("aten._amp_update_scale_.default",)),
    "bfloat16 parameters": Variant(_NARROW),
    "float32, compiled": Variant(_FLOAT32 | _COMPILED, attention=("efficient",)),
    "bfloat16, compiled": Variant(_COMPILED),
    "bfloat16 parameters, compiled": Variant(_NARROW | _COMPILED),
    "full": Variant(_recompute(mode="full")),
    "every second layer": Variant(_recompute(mode="selective", selective_ac_option=2)),
    "per operation": Variant(_recompute(mode="selective", selective_ac_option="op")),
    "full, compiled": Variant(_recompute(mode="full") | _COMPILED),
    "per operation, compiled": Variant(_recompute(mode="selective", selective_ac_option="op") | _COMPILED),
    "full, by chunks": Variant(_recompute(mode="full", sequence_chunks=3)),
    "full, by chunks, compiled": Variant(_recompute(mode="full", sequence_chunks=3) | _COMPILED),
    "full, offload": Variant(_recompute(mode="full", offload=True), _OFFLOADED),
    "full, offload, compiled": Variant(_recompute(mode="full", offload=True) | _COMPILED, _OFFLOADED),
    "memory_budget": Variant(_recompute(mode="memory_budget", memory_budget=0.3) | _COMPILED),
    "memory_budget, document_mask": Variant(
        _recompute(mode="memory_budget", memory_budget=0.3) | _COMPILED | _MASKED, attention=("flex",)
    ),
    "document_mask": Variant(_MASKED, attention=("flex",)),
    "document_mask, compiled": Variant(_MASKED | _COMPILED, attention=("flex",)),
    "windows": Variant(_GEMMA, attention=("cudnn", "flex")),
    "capped scores": Variant({"model": {**_GEMMA["model"], "flavor": "capped"}}, attention=("flex",)),
    "LoRA": Variant({"lora": {"enable": True, "rank": 4}}),
    "float8": Variant(_FLOAT8, _SCALED),
    "float8, compiled": Variant(_FLOAT8 | _COMPILED, _SCALED),
    "Adam": Variant(_optimizer(name="Adam"), ("aten._fused_adam_.default",)),
    "foreach": Variant(_optimizer(implementation="foreach"), ("aten._foreach_addcdiv_.ScalarList",)),
    "for-loop": Variant(_optimizer(implementation="for-loop"), ("aten.addcdiv_.default",)),
    "Muon": Variant(_optimizer(name="Muon")),
    "Muon, bfloat16 parameters": Variant(_NARROW | _optimizer(name="Muon", rounding="compensated")),
    "cpu_offload": Variant({"parallelism": {"cpu_offload": True}}),
    "mixture": Variant(_MIXTURE, _GROUPED),
    "mixture, compiled": Variant(_MIXTURE | _COMPILED, _GROUPED),
    "mixture, full": Variant(_MIXTURE | _recompute(mode="full"), _GROUPED),
    "mixture, full, compiled": Variant(_MIXTURE | _COMPILED | _recompute(mode="full"), _GROUPED, passes=2),
    "mixture, per operation": Variant(_MIXTURE | _recompute(mode="selective", selective_ac_option="op"), _GROUPED),
    "mixture, per operation, compiled": Variant(
        _MIXTURE | _COMPILED | _recompute(mode="selective", selective_ac_option="op"), _GROUPED
    ),
    "mixture, Muon": Variant(_MIXTURE | _optimizer(name="Muon"), _GROUPED),
    "document_mask, MTP modules, compiled": Variant(
        {"training": {"document_mask": True, "predict_further": 2}} | _COMPILED, attention=("flex",)
    ),
    "EMA": Variant(_optimizer(ema_decay=0.999), ("aten.lerp_.Tensor",)),
}


class Cell(NamedTuple):
    """A variant on a mesh."""

    mesh: str
    variant: str

    @property
    def degrees(self) -> dict[str, int]:
        return MESHES[self.mesh]

    @property
    def ranks(self) -> int:
        return 1 if self.mesh == "1 rank" else 8

    @property
    def rank(self) -> int:
        """Which of the ranks is simulated."""
        return self.ranks - 1 if "last rank" in self.mesh else 0

    @property
    def waits_for_counts(self) -> int:
        """How often a step waits for the device in each MoE layer: for the sizes of messages if experts are split."""
        return 2 * VARIANTS[self.variant].passes if "ep" in self.degrees else 0

    @property
    def runs(self) -> tuple[str, ...]:
        """Operations that its step must run."""
        return VARIANTS[self.variant].runs

    @property
    def attention(self) -> tuple[str, ...]:
        """The attention kernels that its step must run: over gathered keys, only FlexAttention supports the mask."""
        return ("flex",) if "gather" in self.mesh else VARIANTS[self.variant].attention

    @property
    def sections(self) -> Sections:
        """The sections of its configuration, with the degrees of its mesh: two microbatches a step."""
        replicate, shard, context, tensor = (self.degrees.get(name, 1) for name in ("dp_replicate", "dp_shard", "cp", "tp"))
        parallelism: dict[str, Any] = {"data_parallel_replicate_degree": replicate, "tensor_parallel_degree": tensor}
        if "ep" in self.degrees:
            parallelism["expert_parallel_degree"] = self.degrees["ep"]
        if context > 1:
            parallelism |= {"context_parallel_degree": context, "context_parallel_method": self.mesh.split(", ")[1]}
        own = VARIANTS[self.variant].sections
        if "pp" in self.degrees:
            parallelism |= {
                "pipeline_parallel_degree": self.degrees["pp"],
                "pipeline_parallel_schedule": self.mesh.split(", ")[-2],
            }
            own = own | {"model": own.get("model", {}) | {"overrides": {"n_layers": 4}}}
        training = {"global_batch_size": 16, "local_batch_size": 8 // (replicate * shard), "mixed_precision_param": "bfloat16"}
        return own | {
            "parallelism": parallelism | own.get("parallelism", {}),
            "training": training | own.get("training", {}),
            "validation": {"enable": True, "steps": 1},
        }


# Variants that context parallelism changes: attention, its mask, and their recomputation or compilation.
_OF_CONTEXT = (
    *("bfloat16", "bfloat16, compiled", "full, by chunks, compiled", "full, offload", "per operation, compiled"),
    *("memory_budget", "document_mask", "document_mask, compiled", "windows", "capped scores", "LoRA", "float8, compiled"),
)
_IN_TURN = ("FSDP 8", "1 rank", "FSDP 4 x TP 2", "FSDP 4 x TP 2")  # of dense variants: each is on one of these meshes
_BY_CONTEXT = ("CP 8, gather", "FSDP 4 x CP 2, ulysses")  # those of context parallelism in turn
_OF_REPLICAS = ("bfloat16", "full, offload", "document_mask", "LoRA", "Muon")
# "FSDP 4 x TP 2, EP 8" has all MoE variants
_OF_EXPERTS = {
    "FSDP 8, EP 4": ("mixture", "mixture, full, compiled", "mixture, Muon"),
    "FSDP 4 x TP 2": ("mixture, compiled", "mixture, full"),
}
# Each variant that a pipeline changes is on one or two meshes.
_OF_PIPELINES = {
    "PP 2 x FSDP 4, 1F1B, first rank": ("bfloat16, compiled", "document_mask", "LoRA"),
    "PP 2 x FSDP 4, 1F1B, last rank": ("float16", "full, offload", "Muon", "bfloat16 parameters, compiled"),
    "PP 2 x FSDP 4, Interleaved1F1B, last rank": ("bfloat16", "per operation", "float8"),
    "PP 2 x FSDP 2 x TP 2, Interleaved1F1B, first rank": ("bfloat16, compiled", "full"),
    "PP 2 x FSDP 4, EP 4, Interleaved1F1B, first rank": ("mixture, compiled", "mixture, full", "mixture, per operation"),
}


def _says_something(mesh: str, variant: str) -> bool:
    if "TP" in mesh and "by chunks" in variant:
        return False  # refused
    if "PP" in mesh:
        return variant in _OF_PIPELINES[mesh]
    if "mixture" in variant:
        return mesh == "FSDP 4 x TP 2, EP 8" or variant in _OF_EXPERTS.get(mesh, ())
    if "EP" in mesh:
        return False
    if "CP" in mesh:
        return variant in _OF_CONTEXT and mesh == _BY_CONTEXT[_OF_CONTEXT.index(variant) % 2]
    if mesh == "HSDP 2 x 4":
        return variant in _OF_REPLICAS
    return mesh == _IN_TURN[[*VARIANTS].index(variant) % len(_IN_TURN)]


CELLS = {f"{mesh}, {variant}": Cell(mesh, variant) for mesh in MESHES for variant in VARIANTS if _says_something(mesh, variant)}
