"""PyTorch's private names: all that titanlite uses, what for, and the versions that each was tried on.

PyTorch may rename them in any version. `tests/unit/test_torch_private.py` says which are gone, and that no other file uses one;
it also lists the attributes that the functions below use. models/torch_private.py has the names of the model families. A name
of `NAMES` is imported from here like any other:

    from titanlite.ground.torch_private import DefaultReduceScatter

Its module is loaded at that moment, and not with this file, since some take a second.
"""

import contextlib
import datetime
import functools
import inspect
import operator
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo
from torch.utils.checkpoint import CheckpointPolicy

VERSIONS = ("2.11", "2.13")  # each name is in both
_FSDP, _ATEN = "torch.distributed.fsdp._fully_shard", "torch:ops.aten."
_MESH = "torch.distributed.device_mesh:DeviceMesh"
_DISPATCH, _C10D = "torch.utils._python_dispatch", "torch.distributed.distributed_c10d"

# name here -> "module:name", or "module:Class.attribute"
NAMES = {
    # checkpoints
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",  # the location of a shard, in DCP's metadata
    "foreach_copy_": "torch:_foreach_copy_",  # copies all tensors of a checkpoint at once
    # process groups
    "set_group_timeout": f"{_C10D}:_set_pg_timeout",  # short timeouts after a long first step
    "all_groups": f"{_C10D}:_world.pg_map",  # every process group there is, to set its timeout
    "resolve_process_group": f"{_C10D}:_resolve_process_group",  # the group of a name, as operations have it
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",  # the process group of a prediction
    # async TP: the compiler's pass requires the call
    "enable_symm_mem_for_group": "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    # meshes
    "flatten": f"{_MESH}._flatten",  # all dimensions of a mesh as one
    "unflatten": f"{_MESH}._unflatten",  # one dimension as several, for experts
    "concatenate": f"{_MESH}._concatenate",  # the dimensions of several meshes in one
    # DTensor
    # the positions of a shard in the whole tensor
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    # the same for the shard of any rank
    "compute_shape_and_offset_at": "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    # whole tensors of a prediction, which no rank holds
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop:ShardingPropagator",
    # FSDP2
    "fsdp_common": f"{_FSDP}:_fsdp_common",  # its descriptions of meshes, for experts on a mesh of their own
    "DefaultReduceScatter": f"{_FSDP}._fsdp_collectives:DefaultReduceScatter",  # checks what a waiting all-reduce sums
    # modes and trees
    "TorchDispatchMode": f"{_DISPATCH}:TorchDispatchMode",  # sees every operation: predictions, and what blocks exchange
    "is_traceable_wrapper_subclass_type": f"{_DISPATCH}:is_traceable_wrapper_subclass_type",  # lets DTensors be
    "disable_current_modes": f"{_DISPATCH}:_disable_current_modes",  # reads meshes while FakeTensorMode is on
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",  # a forward pass without memory
    "tree_flatten": "torch.utils._pytree:tree_flatten",  # the tensors among arguments and results
    "tree_leaves": "torch.utils._pytree:tree_leaves",  # the same
    "tree_map": "torch.utils._pytree:tree_map",  # the same, replaced
    "reparametrize_module": "torch.nn.utils.stateless:_reparametrize_module",  # parameters that are cast for one call
    # compiler
    "compile_counters": "torch._dynamo.utils:counters",  # counts recompilations
    "get_compilation_metrics": "torch._dynamo.utils:get_compilation_metrics",  # the cause of each
    "aot_autograd": "torch._dynamo.backends.common:aot_autograd",  # predictions: graphs as inductor gets them
    "register_backend": "torch._dynamo:register_backend",  # the same
    "select_decomp_table": "torch._inductor.compile_fx:select_decomp_table",  # the same
    "partitioner": "torch._functorch:config",  # activation_checkpoint.memory_budget
    "inductor_config": "torch._inductor:config",  # switches async TP on, whose option is private too
    "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",  # a pass of ours before that of async TP
    "get_hash_for_files": "torch._inductor.custom_graph_pass:get_hash_for_files",  # its part of the compiler's cache key
    "maybe_mark_dynamic": "torch._dynamo:maybe_mark_dynamic",  # one kernel for matrices with any number of rows
    "shapes_config": "torch.fx.experimental:_config",  # kernels for matrices of any shape
    "get_cpp_compiler": "torch._inductor.cpp_builder:get_cpp_compiler",  # whether inductor finds a C++ compiler
    "InvalidCxxCompiler": "torch._inductor.exc:InvalidCxxCompiler",  # says that it finds none
    # operations
    "flash_attention": f"{_ATEN}_scaled_dot_product_flash_attention",  # its result is kept for the backward pass
    "efficient_attention": f"{_ATEN}_scaled_dot_product_efficient_attention",  # the same
    "cudnn_attention": f"{_ATEN}_scaled_dot_product_cudnn_attention",  # the same
    "math_attention": f"{_ATEN}_scaled_dot_product_attention_math",  # the same
    "cpu_attention": f"{_ATEN}_scaled_dot_product_flash_attention_for_cpu",  # the same, and its FLOPs
    "cpu_attention_backward": f"{_ATEN}_scaled_dot_product_flash_attention_for_cpu_backward",  # its FLOPs
    "flash_attention_backward": f"{_ATEN}_scaled_dot_product_flash_attention_backward",  # its FLOPs
    "collectives": "torch:ops._c10d_functional",  # results of collectives are kept for the backward pass
    "bf16_on_cpu": "torch:ops.mkldnn._is_mkldnn_bf16_supported",  # whether the CPU has instructions for bfloat16
    "fp16_on_cpu": "torch:ops.mkldnn._is_mkldnn_fp16_supported",  # the same of float16
    "foreach_div_": "torch:_foreach_div_",  # divides all gradients at once
    "foreach_norm": "torch:_foreach_norm",  # the norms of all gradients at once, on a GPU
    "amp_update_scale_": "torch:_amp_update_scale_",  # the loss scale of float16, without a host sync
    "record_memory_history": "torch.cuda.memory:_record_memory_history",  # profiling.enable_memory_snapshot
    "dump_snapshot": "torch.cuda.memory:_dump_snapshot",  # the same
    "AnyDropout": "torch.nn.modules.dropout:_DropoutNd",  # the base of all dropout layers
}

# In 2.11, a pipeline's messages of whole numbers need gradients, and a unit of FSDP2 has one mesh for all its parameters.
BEFORE_2_13 = torch.__version__ < "2.13"
_make_gloo_group: Callable[..., None] = ProcessGroupGloo.__init__


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"titanlite.ground.torch_private has no {name}")
    return resolve(NAMES[name])


def resolve(path: str) -> Any:
    """What a `path` names. It may be a module that nothing has loaded yet, which is no attribute of its package until then."""
    return pkgutil.resolve_name(path.replace(":", "."))


# ----------------------------------------------------------------------------------------------------------- process groups


def one_thread_per_gloo_group(devices: Callable[[], list[Any]]) -> None:
    """Makes each gloo group that this process joins from now on run its collectives in one thread, where PyTorch takes two.

    Both note the name of the collective that they have ended in one std::string, without a lock (pgStatus_ in
    ProcessGroupGloo::runLoop, 2.11 and 2.13). When a machine is busy, one does so while the other runs the next collective, and
    the heap is corrupt: ranks abort, or wait for ever. Collectives of a group begin in the same order on all ranks, so that one
    thread is enough.

    devices: makes the network devices of a group.
    """
    gloo: Any = ProcessGroupGloo

    def make(group: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = devices(), 1, timeout
        _make_gloo_group(group, store, rank, size, options)

    gloo.__init__ = make


# --------------------------------------------------------------------------------------------------------------------- data


def end_reading(loader: Any) -> None:
    """After the end of a loader's workers: nobody waits for what they have written, not even for the rest of a message. The
    last writing end of their queue is this process's.
    """
    loader._worker_result_queue._writer.close()


# ------------------------------------------------------------------------------------------------------- tensors and modules


def like(tensor: Any, local: Tensor) -> Tensor:
    """A DTensor of this local part, laid out as `tensor`. from_local would move the part to the device of the mesh."""
    return type(tensor)(local, tensor._spec, requires_grad=False)


def storage_of(tensor: Tensor) -> int:
    """What a tensor shares with its views, where it has memory and where it has none."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


@contextlib.contextmanager
def placements_announced(deriving: Callable[[bool], None]) -> Iterator[None]:
    """Calls deriving(True) before DTensor derives placements, on tensors of whole shapes, and deriving(False) afterwards."""
    propagator: Any = __getattr__("ShardingPropagator")
    derive = propagator._propagate_tensor_meta_non_cached

    def announced(*args: Any) -> Any:
        deriving(True)
        try:
            return derive(*args)
        finally:
            deriving(False)

    propagator._propagate_tensor_meta_non_cached = announced
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = derive


def schema(operation: Any) -> Any:
    """Name and arguments of an operation."""
    return operation._schema


def gradient_hooks(tensor: Tensor, accumulated: bool = False) -> list[Callable[..., Any]]:
    """What `Tensor.register_hook` has registered. accumulated: and `register_post_accumulate_grad_hook`."""
    hooks: Any = tensor._backward_hooks
    after: Any = tensor._post_accumulate_grad_hooks if accumulated else None
    return [*(hooks or {}).values(), *(after or {}).values()]


def packet(operation: Any) -> Any:
    """An operation without its overload, as in torch.ops.aten.mm."""
    return operation._overloadpacket


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, also if they are None."""
    return bool(module._parameters)


def with_children(view: Any, model: nn.Module, children: dict[str, Any]) -> None:
    """Gives a shallow copy of a model other children, of any type; the model keeps its own."""
    view._modules = {**model._modules, **children}


# -------------------------------------------------------------------------------------------------------------------- FSDP2


def fsdp_groups(unit: nn.Module) -> list[Any]:
    """FSDP2's groups of a unit's parameters, which are gathered and reduced together: one for each mesh."""
    state = unit._get_fsdp_state()  # type: ignore[operator]  # of FSDPModule
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # 2.11


def set_reduce_scatter(group: Any, communication: Any) -> None:
    group._reduce_scatter_comm = communication


def waits_for_replicas(group: Any) -> bool:
    """Whether a group has reduced gradients over its shards, and not yet over replicas."""
    return group._partial_reduce_output is not None


def accumulate_alike(group: Any) -> None:
    """Adds up all gradients of a group's step in the precision of their reduction.

    FSDP2 leaves the last microbatch's in that of the parameters where they are a parameter's first ones, and then refuses to
    reduce two precisions. Of a group that no microbatch has reached yet, it looks for gradients where there are none.
    """
    reduce, params = group.post_backward, group.fsdp_params

    def post_backward(*_: Any) -> None:
        if not all(hasattr(each, "_unsharded_param") for each in params):
            return
        for each in params:
            each.accumulate_unsharded_grad_if_needed()
        if any(each.unsharded_accumulated_grad is not None for each in params):
            for each in params:
                each.to_accumulated_grad_if_needed()
        reduce()

    group.post_backward = post_backward


def begin_fsdp(root: nn.Module) -> None:
    """What FSDP2 does before its first forward pass. There it takes the precision of reductions from trained parameters."""
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def end_forward(unit: nn.Module) -> None:
    """Ends a forward pass that no backward pass follows, also one that ran a part of the unit's modules."""
    state = unit._get_fsdp_state()  # type: ignore[operator]
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    for each in (state, *fsdp_groups(unit)):
        each._training_state = type(each._training_state).IDLE


# ----------------------------------------------------------------------------------------------------------------- compiler


def set_memory_budget(share: float, kept: tuple[Any, ...]) -> None:
    """The share of activations that the compiler's partitioner keeps. Inductor always keeps the results of `kept` operations
    and the seeds of random numbers."""
    partitioner = resolve(NAMES["partitioner"])
    partitioner.activation_memory_budget = max(share, 1e-6)  # at 0 it keeps inputs alone
    resolve(NAMES["inductor_config"]).joint_custom_post_pass = _graph_pass(_keep, kept) if share < 1 else None
    # Under tensor parallelism a graph's inputs include the DeviceMesh, whose size PyTorch 2.13 cannot
    # determine. It holds no activations. 2.11 has no such setting and needs none.
    if hasattr(partitioner, "unsafe_treat_script_objects_as_zero_size"):
        partitioner.unsafe_treat_script_objects_as_zero_size = True


def register_partitioning(name: str, run: Callable[[torch.fx.GraphModule, list[Any]], Any]) -> None:
    """A backend of torch.compile that partitions as inductor does. run: computes a graph, and clears its list of arguments."""
    from functorch.compile import min_cut_rematerialization_partition

    def compiled(graph: torch.fx.GraphModule, _: Any) -> Any:
        call: Any = functools.partial(run, graph)
        call._boxed_call = True  # takes its arguments as a list
        return call

    backend = resolve(NAMES["aot_autograd"])(
        fw_compiler=compiled,
        bw_compiler=compiled,
        decompositions=lambda: resolve(NAMES["select_decomp_table"])(),  # loads inductor
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    resolve(NAMES["register_backend"])(backend, name=name)


def _keep(graph: torch.fx.Graph, kept: tuple[Any, ...]) -> None:
    """Marks what a joint graph must not recompute: `kept`, and what draws random numbers, by now a few seeds.

    PyTorch 2.13 recomputes seeds at small budgets: dropout then has other zeros in the backward pass than in the forward pass.
    """
    for node in graph.nodes:
        source = node.args[0] if node.target is operator.getitem else node
        if source.target in kept or _draws(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _draws(node: torch.fx.Node) -> bool:
    """Whether it draws random numbers. The tag says so of attention without dropout too, whose results are large."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0


def set_async_tensor_parallel(enable: bool, before: Callable[[torch.fx.Graph], None]) -> None:
    """Switches the compiler's pass of async TP on or off, and a function that changes each graph before it."""
    config = resolve(NAMES["inductor_config"])
    config._micro_pipeline_tp = enable
    config.post_grad_custom_pre_pass = _graph_pass(before) if enable else None


def _graph_pass(function: Callable[..., None], *more: Any) -> Any:
    key = resolve(NAMES["get_hash_for_files"])((inspect.getfile(function),), str(more))
    methods = {"__call__": lambda self, graph: function(graph, *more), "uuid": lambda self: key}
    return type("GraphPass", (resolve(NAMES["CustomGraphPass"]),), methods)()
