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


class Part(NamedTuple):
    """A part of a variant, and what it decides only on a GPU."""

    sections: Sections
    runs: tuple[str, ...] = ()  # operations that the step must run
    attention: tuple[str, ...] = ()  # the attention kernels that the step must run, if they are not cuDNN's


_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}  # of the pairs of a head
# A variant is a list of these; where none sets it, in bfloat16.
PARTS: dict[str, Part] = {
    "float32": Part({"training": {"mixed_precision_param": "float32"}}, attention=("efficient",)),
    # the optimizer, and the loss, which gets float32 from matmuls of 16 bits; not on a first rank
    "bfloat16": Part({}, ("aten._fused_adamw_.default", "aten.mm.dtype_out")),
    "float16": Part({"training": {"mixed_precision_param": "float16"}}, ("aten._amp_update_scale_.default",)),
    "bfloat16 parameters": Part({"training": {"dtype": "bfloat16"}}),
    "compiled": Part({"compile": {"enable": True, "backend": "aot_eager"}}),
    "full": Part({"activation_checkpoint": {"mode": "full"}}),
    "per operation": Part({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}),
    "memory_budget": Part({"activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.3}}),
    "by chunks": Part({"activation_checkpoint": {"sequence_chunks": 3}}),
    "offload": Part(
        {"activation_checkpoint": {"offload": True}},
        ("a copy of 3 dimensions from cuda to cpu", "a copy of 3 dimensions from cpu to cuda"),
    ),
    "document_mask": Part({"training": {"document_mask": True}}, attention=("flex",)),
    "windows": Part({"model": {"name": "tests.tiny_gemma3"}}, attention=("cudnn", "flex")),
    "capped scores": Part({"model": {"name": "tests.tiny_gemma3", "flavor": "capped"}}, attention=("flex",)),
    "MTP modules": Part({"training": {"predict_further": 2}}),
    "LoRA": Part({"lora": {"enable": True, "rank": 4}}),
    "float8": Part({"float8": {"enable": True}}, ("aten._scaled_mm.default",)),
    "Adam": Part({"optimizer": {"name": "Adam"}}, ("aten._fused_adam_.default",)),
    "foreach": Part({"optimizer": {"implementation": "foreach"}}, ("aten._foreach_addcdiv_.ScalarList",)),
    "for-loop": Part({"optimizer": {"implementation": "for-loop"}}, ("aten.addcdiv_.default",)),
    "Muon": Part({"optimizer": {"name": "Muon"}}),
    "compensated": Part({"optimizer": {"rounding": "compensated"}}),
    "EMA": Part({"optimizer": {"ema_decay": 0.999}}, ("aten.lerp_.Tensor",)),
    # samples with frequencies that follow from the lengths of the texts
    "cpu_offload": Part(
        {
            "parallelism": {"cpu_offload": True},
            "model": {"overrides": {"rope_scaling": {**_FACTORS, "rope_type": "longrope", "original_max_positions": 8}}},
        }
    ),
    "mixture": Part(
        {
            "model": {"name": "tests.tiny_moe"},
            "moe": {"bias_update_speed": 1e-3, "balance_loss": 1e-4, "router_z_loss": 1e-3},
        },
        ("aten._grouped_mm.default", "aten.mm.dtype"),  # the router gets float32 too
    ),
    "nodes": Part({"parallelism": {"expert_parallel_node_size": 2}}),
}


class Cell(NamedTuple):
    """A variant on a mesh."""

    mesh: str
    variant: str

    @property
    def parts(self) -> list[Part]:
        return [PARTS[name] for name in self.variant.split(", ")]

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
        if "ep" not in self.degrees:
            return 0
        return 4 if self.variant.endswith("full, compiled") else 2  # two microbatches; it repeats what it recomputes

    @property
    def runs(self) -> set[str]:
        """Operations that its step must run."""
        return {operation for part in self.parts for operation in part.runs}

    @property
    def attention(self) -> set[str]:
        """The attention kernels that its step must run: over gathered keys, only FlexAttention supports the mask."""
        own = {kernel for part in self.parts for kernel in part.attention}
        return {"flex"} if "gather" in self.mesh else own or {"cudnn"}

    @property
    def sections(self) -> Sections:
        """The sections of its configuration beside the degrees of context, pipeline and expert parallelism: two microbatches a
        step.
        """
        replicate, shard, tensor = (self.degrees.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp"))
        parallelism: dict[str, Any] = {"data_parallel_replicate_degree": replicate, "tensor_parallel_degree": tensor}
        if "cp" in self.degrees:
            parallelism["context_parallel_method"] = self.mesh.split(", ")[1]
        if "pp" in self.degrees:
            parallelism["pipeline_parallel_schedule"] = self.mesh.split(", ")[-2]
        training = {"global_batch_size": 16, "local_batch_size": 8 // (replicate * shard), "mixed_precision_param": "bfloat16"}
        found: Sections = {
            "parallelism": parallelism,
            "training": training,
            "validation": {"enable": True, "steps": 1},
            "model": {"overrides": {"n_layers": 4}} if "pp" in self.degrees else {},
        }
        for part in self.parts:
            for section, keys in part.sections.items():
                found[section] = found.get(section, {}) | keys
        return found


# Which variants run on which mesh. Each variant that does not depend on the mesh is on one of the first three.
_ON: dict[str, tuple[str, ...]] = {
    "1 rank": (
        *("bfloat16", "bfloat16, compiled", "per operation", "full, by chunks, compiled", "capped scores", "Adam"),
        *("memory_budget, compiled, document_mask", "Muon, bfloat16 parameters, compensated"),
    ),
    "FSDP 8": ("float32", "windows", "float8, compiled", "Muon"),
    "FSDP 4 x TP 2": (
        *("float16", "bfloat16 parameters", "full, compiled", "per operation, compiled", "full, offload, compiled"),
        *("document_mask", "document_mask, MTP modules, compiled", "LoRA", "float8", "foreach", "for-loop"),
        *("mixture, compiled", "mixture, cpu_offload", "EMA"),
    ),
    "HSDP 2 x 4": ("bfloat16", "Muon"),
    "CP 8, gather": ("bfloat16", "per operation, compiled", "full, by chunks, compiled", "document_mask"),
    "FSDP 4 x CP 2, ulysses": ("bfloat16, compiled", "full, offload", "memory_budget, compiled", "document_mask, compiled"),
    "FSDP 8, EP 4": ("mixture, nodes",),
    "FSDP 4 x TP 2, EP 8": (
        *("mixture, compiled", "mixture, full", "mixture, full, compiled", "mixture, per operation, compiled", "mixture, Muon"),
    ),
    "PP 2 x FSDP 4, 1F1B, first rank": ("compiled", "document_mask"),
    "PP 2 x FSDP 4, 1F1B, last rank": ("float16", "full, offload"),
    "PP 2 x FSDP 4, Interleaved1F1B, last rank": ("bfloat16", "per operation"),
    "PP 2 x FSDP 2 x TP 2, Interleaved1F1B, first rank": ("full",),
    "PP 2 x FSDP 4, EP 4, Interleaved1F1B, first rank": ("mixture, compiled", "mixture, per operation"),
}

CELLS = {f"{mesh}, {variant}": Cell(mesh, variant) for mesh, variants in _ON.items() for variant in variants}
