"""What the model of time knows of a configuration: the job, and the mesh that it describes; and how far it errs."""

import functools

from titanlite.config.effects import EffectiveWhen, Hardware
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.optim.state import state_bytes
from titanlite.parallel.fsdp import GradientSync
from titanlite.parallel.mesh import resolve_degrees
from titanlite.parallel.pipeline import split_layers
from titanlite.plan.pipeline import stage_costs
from titanlite.plan.search import keys_of
from titanlite.plan.shape import Shape
from titanlite.plan.time import ASYNC_TP, ASYNC_TP_FLOAT8, Choice, Job, Stages, device_named, one_stage
from titanlite.registry.family import family_of
from titanlite.registry.own import calling
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.parameters import is_tied

# Mean and ninth decile of the absolute error in tokens per second, of the blind rows: python -m benchmarks.plan_score
ERRORS = {
    "a100 dense": (0.045, 0.109),
    "b200 dense": (0.131, 0.191),
    "h100 dense": (0.104, 0.193),
    "h100 MoE": (0.199, 0.392),
    "h200 dense": (0.176, 0.380),
}
MEMORY_ERROR = 0.25  # the largest difference between `memory` and `titanlite estimate` over the recipes is 22%
# Conditions on keys -> what the model of time lacks for them
_UNKNOWN = {
    "training.predict_further > 0": "MTP modules",
    "distillation.teacher is set": "a second model",
    "parallelism.cpu_offload = true": "copies to the host",
    "parallelism.reduce_every_microbatch = false": "gradients that are reduced once a step",
    'activation_checkpoint.selective_ac_option != "op"': "recomputation of some blocks only",
    "float8.emulate = true": "matmuls of float8 values in float32",
    'float8.recipe_name = "rowwise_with_gw_hp"': "float8 without the gradients of weights",
}
# Conditions on keys -> what a prediction leaves out with them, though it may be long
_LEFT_OUT = {
    'optimizer.name = "Muon"': "Muon's matmuls",
    'optimizer.name has ":"': "the optimizer's own operations",
    "activation_checkpoint.offload = true": "the copies of activation_checkpoint.offload",
    "training.document_mask = true": "masks of documents",
    'parallelism.context_parallel_method = "ulysses"': "all-to-alls of context parallelism",
    "float8.filter_fqns is set": "that float8.filter_fqns keeps layers in bfloat16",
}
# Choices with which each key that a job depends on has an effect, where it has one with any choice
_ANY = {
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.pipeline_parallel_degree": 1,
    "activation_checkpoint.mode": "selective",
}


def job_of(config: Config, device: str, node: int, global_batch: int) -> Job:
    """device: of devices.toml. node: GPUs of a node. global_batch: sequences.

    Raises UserError for a configuration that the model of time does not know.
    """
    training, known = config.training, device_named(device)
    settled = config.with_keys(_ANY).settled(Hardware(cuda=not known.cpu_ranks))  # as a run does
    float8, compile, overlaps = settled.float8, settled.compile, settled.parallelism.enable_async_tensor_parallel
    for condition, lacking in _UNKNOWN.items():
        if EffectiveWhen(condition).failing(settled, Hardware()) is None:
            raise UserError(f"{condition}: plan does not know {lacking}; compare meshes with titanlite estimate")
    if float8.enable and not known.fp8_tflops:
        raise UserError(f"float8.enable = true: --device {device} has no float8 matmuls")
    item = DTYPES[training.mixed_precision_param].itemsize
    if item == 4 and not known.float32_tflops:
        remedy = f'--device {device} knows no rate of float32; set it to "bfloat16", or use a file of --calibrate'
        raise UserError(f'training.mixed_precision_param = "float32": {remedy}')
    family = family_of(config.model)
    model = on_meta(family, config)
    parameters = [*model.named_parameters()]
    if frozen := [name for name, each in parameters if not each.requires_grad]:
        how = "is frozen, by lora.enable, optimizer.groups or the model itself"
        raise UserError(f"{frozen[0]}: {how}; plan does not know frozen weights; compare meshes with titanlite estimate")
    values = sum(p.numel() for _, p in parameters)

    @functools.cache
    def stages(degree: int, schedule: str) -> Stages:
        if degree == 1:
            return one_stage(degree, schedule)
        changed = config.with_keys(keys_of(Choice(pp=degree, schedule=schedule)))
        blocks = [len(names) for names in split_layers(changed, family, model)]
        return Stages.of(blocks, stage_costs(changed, family, model), degree)

    with calling(f"{config.model.title}: a forward pass fails"):  # of dimensions that do not fit together, or a fork's
        shape = Shape.of(family, model, training.seq_len)
    return Job(
        shape,
        known,
        node,
        training.seq_len,
        global_batch,
        float8=float8.enable,
        compiled=compile.enable and "model" in compile.components,
        exposed_tp=(ASYNC_TP_FLOAT8 if float8.enable else ASYNC_TP) if overlaps else 1.0,
        weight_bytes=DTYPES[training.dtype].itemsize,
        state_bytes=sum(p.numel() * state_bytes(name, p, settled.optimizer) for name, p in parameters) / values,
        reduce_bytes=DTYPES[training.mixed_precision_reduce].itemsize,
        item=item,
        gathered=1 if float8.enable_fsdp_float8_all_gather else item,
        replicas_each=not GradientSync.of(settled).replicas,
        tied=is_tied(model),
        stages=stages,
    )


def left_out(config: Config) -> str:
    """What the predictions of a settled configuration lack, by name, or ""."""
    return ", ".join(what for when, what in _LEFT_OUT.items() if EffectiveWhen(when).failing(config, Hardware()) is None)


def choice_of(config: Config, ranks: int) -> Choice:
    """The mesh that a configuration has on so many ranks. Raises UserError for recomputation that the model does not know."""
    mode, cfg = config.activation_checkpoint.mode, config.parallelism
    if mode == "memory_budget":
        raise UserError('activation_checkpoint.mode = "memory_budget": plan does not know what the compiler recomputes')
    degrees = resolve_degrees(cfg, ranks)
    return Choice(
        **degrees,
        ep=cfg.expert_parallel_degree,
        schedule=cfg.pipeline_parallel_schedule,
        microbatch=config.training.local_batch_size,
        recompute=mode,
        ep_node=cfg.expert_parallel_node_size,
        reshard=cfg.fsdp_reshard_after_forward != "never",
    )


def errors_of(job: Job, device: str) -> tuple[float, float] | None:
    """Mean and ninth decile of the error of such predictions, or None where no published run says it."""
    return ERRORS.get(f"{device} {job.shape.kind}")
