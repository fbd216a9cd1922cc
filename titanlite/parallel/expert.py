"""Expert parallelism: the experts of each MoE layer are split over ranks, to which tokens are dispatched (models/exchange.py).

Tensor parallelism does not split experts: sequence and context parallelism give each rank its own tokens. So all ranks of a
replica are data-parallel ranks for experts. Neighbors have different experts, and FSDP2 shards equal experts over their ranks.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from models.decoder import Decoder
from models.moe import Exchange, experts_of
from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13, concatenate, flatten, unflatten
from titanlite.parallel.mesh import WITHIN_A_REPLICA
from titanlite.transforms.parameters import keeping_ties


def apply_expert_parallel(model: Decoder, config: Config, mesh: DeviceMesh) -> DeviceMesh | None:
    """Splits experts over ranks, to which their tokens are then dispatched. It makes groups, so all ranks call it together.

    Returns the mesh of `fully_shard` for experts, ([replicas,] ranks with equal experts); None where no experts are split.
    """
    degree = config.parallelism.expert_parallel_degree
    if degree == 1:
        return None
    every = flatten(mesh[WITHIN_A_REPLICA], "within_a_replica")
    apart = unflatten(every, 0, (every.size() // degree, degree), ("expert_shard", "ep"))
    split, shards, replicated = apart["ep"], apart["expert_shard"], mesh["dp_replicate"].size() > 1
    groups = [split]
    if (node := config.parallelism.expert_parallel_node_size) > 1:
        hops = unflatten(split, 0, (degree // node, node), ("between_nodes", "within_a_node"))
        groups = [hops["between_nodes"], hops["within_a_node"]]
    names = ",".join(each.get_group().group_name for each in groups)
    exchange = Exchange(names, degree, config.moe.max_tokens_factor)
    with keeping_ties(model):
        for module in experts_of(model):
            module.exchange = exchange
            for name, parameter in module.named_parameters(recurse=False):
                part = nn.Parameter(distribute_tensor(parameter, split, [Shard(0)]), requires_grad=parameter.requires_grad)
                module.register_parameter(name, part)
    return concatenate([mesh["dp_replicate"], shards]) if replicated else shards


def fit(degree: int, node: int) -> bool:
    """Whether so many ranks of experts are several whole nodes of `node` ranks; 1: nodes do not matter."""
    return node == 1 or (degree > node and degree % node == 0)


def unsplittable(model: nn.Module, degree: int) -> str:
    """What a model has that `degree` ranks cannot split, as in "the model has ..."; "" if they can split its experts."""
    numbers = {module.n_experts for module in experts_of(model)}
    if not numbers:
        return "no Experts of models/moe.py"
    undivided = sorted(number for number in numbers if number % degree)
    return f"{' or '.join(map(str, undivided))} experts, which {degree} does not divide" if undivided else ""


def faults(config: Config, model: Decoder) -> Iterator[str]:
    """A degree for a model without experts, or that does not divide them; what FSDP2 cannot do with it."""
    degree = config.parallelism.expert_parallel_degree
    if degree == 1:
        return
    key, node = f"parallelism.expert_parallel_degree = {degree}", config.parallelism.expert_parallel_node_size
    if not fit(degree, node):
        yield f"parallelism.expert_parallel_node_size = {node}: {key} must be a multiple above it; otherwise set it to 1"
    if reason := unsplittable(model, degree):
        yield f"{key}: {config.model.title} has {reason}; set it to 1"
    if BEFORE_2_13:
        needs = "needs PyTorch 2.13, whose FSDP2 has a mesh for each parameter"
        cfg = config.activation_checkpoint
        if config.compile.enable and "model" in config.compile.components:
            yield f"{key}: with compile.enable = true, {needs}"
        if cfg.mode == "selective" and cfg.selective_ac_option == "op":
            yield f'{key}: with activation_checkpoint.selective_ac_option = "op", {needs}'
