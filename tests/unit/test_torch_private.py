"""PyTorch's private names: which are gone, and that only two files have them."""

import ast
import contextlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import models.torch_private
from titanlite.ground import torch_private
from titanlite.ground.torch_private import NAMES, VERSIONS, resolve

ROOT = Path(__file__).parents[2]
FILES = {Path(torch_private.__file__), Path(models.torch_private.__file__)}  # the latter is imported only if all names exist
# Private names of other libraries, and names that only look private.
OTHERS = {
    "_replace", "_asdict", "_fields", "_field_defaults",  # of named tuples
    "_exit", "_getframe", "_current_frames",  # os, sys
    "_output_child_to_const",  # jinja2, in data/prepare/chat.py
    "_option_string_actions", "_AppendAction",  # argparse, in tools/options.py
    "_writer", "_on_queue_feeder_error",  # of multiprocessing.Queue, in ground/torch_private.py and data/batches.py
    "_strip_protocol",  # fsspec, in data/prepare/documents.py
}  # fmt: skip
_FSDP = "torch.distributed.fsdp._fully_shard"
_LOADER = "torchdata.stateful_dataloader.stateful_dataloader:_StatefulMultiProcessingDataLoaderIter"


class Name(NamedTuple):
    """An attribute of a class or a module: "module:Class.attribute"."""

    path: str
    use: str  # the function or the file
    tried: tuple[str, ...] = VERSIONS  # the versions of PyTorch that have it


# Attributes of PyTorch's objects, which functions of torch_private.py use, and those functions.
ATTRIBUTES = (
    Name("torch.distributed:ProcessGroupGloo._Options", "one_thread_per_gloo_group"),
    Name("torch.distributed:ProcessGroupGloo._Options._devices", "one_thread_per_gloo_group"),
    Name("torch.distributed:ProcessGroupGloo._Options._threads", "one_thread_per_gloo_group"),
    Name("torch.distributed:ProcessGroupGloo._Options._timeout", "one_thread_per_gloo_group"),
    Name(f"{_LOADER}._worker_result_queue", "end_reading"),
    Name("torch.distributed.tensor:DTensor._spec", "like"),
    Name("torch.distributed.tensor:DTensor._local_tensor", "storage_of"),
    Name("torch:UntypedStorage._cdata", "storage_of"),
    Name(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached", "placements_announced"
    ),
    Name("torch._ops:OpOverload._schema", "schema"),
    Name("torch._ops:OpOverload._overloadpacket", "packet"),
    Name("torch:Tensor._backward_hooks", "gradient_hooks"),
    Name("torch:Tensor._post_accumulate_grad_hooks", "gradient_hooks"),
    Name("torch.nn:Module._modules", "with_children"),
    Name("torch.nn:Module._parameters", "has_parameters"),
    Name("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "fsdp_groups"),
    Name(f"{_FSDP}._fsdp_state:FSDPState._fsdp_param_groups", "fsdp_groups", ("2.13",)),
    Name(f"{_FSDP}._fsdp_state:FSDPState._fsdp_param_group", "fsdp_groups", ("2.11",)),
    Name(f"{_FSDP}._fsdp_param_group:FSDPParamGroup._reduce_scatter_comm", "set_reduce_scatter"),
    Name(f"{_FSDP}._fsdp_param_group:FSDPParamGroup._partial_reduce_output", "waits_for_replicas"),
    *(
        Name(f"{_FSDP}.{name}", "accumulate_alike")
        for name in (
            "_fsdp_param_group:FSDPParamGroup.post_backward",
            "_fsdp_param:FSDPParam._unsharded_param",
            "_fsdp_param:FSDPParam.accumulate_unsharded_grad_if_needed",
            "_fsdp_param:FSDPParam.to_accumulated_grad_if_needed",
            "_fsdp_param:FSDPParam.unsharded_accumulated_grad",
        )
    ),
    Name(f"{_FSDP}._fsdp_state:FSDPState._lazy_init", "begin_fsdp"),
    *(
        Name(f"{_FSDP}._fsdp_state:{name}", "end_forward")
        for name in ("FSDPState._modules_to_run_forward", "FSDPState._training_state", "FSDPStateContext.iter_forward_root")
    ),
    Name(f"{_FSDP}._fsdp_state:FSDPState._state_ctx", "end_forward"),
    Name(f"{_FSDP}._fsdp_param_group:FSDPParamGroup._training_state", "end_forward"),
    Name(f"{_FSDP}._fsdp_common:TrainingState.IDLE", "end_forward"),
    Name(f"{_FSDP}._fsdp_common:ShardPlacementResult", "fsdp_common", ("2.13",)),
    Name("torch._functorch.config:unsafe_treat_script_objects_as_zero_size", "set_memory_budget", ("2.13",)),
    Name("torch._inductor.config:_micro_pipeline_tp", "set_async_tensor_parallel"),
    Name("torch._inductor.config:post_grad_custom_pre_pass", "set_async_tensor_parallel"),
    Name("torch._inductor.config:joint_custom_post_pass", "set_memory_budget"),
)

# Private methods and attributes of PyTorch's classes that classes of titanlite override or read: they are where the class is.
_CONTEXT = "torch.distributed.elastic.multiprocessing.api:SubprocessContext"
_STAGE = "torch.distributed.pipelining:PipelineStage"
INHERITED = (
    Name(f"{_CONTEXT}._poll", "launch/launcher.py: the launcher looks at its ranks"),
    Name(f"{_CONTEXT}._capture_process_failures", "launch/launcher.py: exit codes that are no failures"),
    Name(f"{_CONTEXT}._close", "launch/launcher.py: how ranks are ended"),
    Name(f"{_CONTEXT}._failures", "launch/launcher.py: the failures so far"),
    Name(f"{_STAGE}._prepare_forward_infra", "parallel/late_stage.py: buffers without memory"),
    Name(f"{_STAGE}._prepare_backward_infra", "parallel/late_stage.py: the same"),
)
INHERITED_NAMES = {name.path.rpartition(".")[2] for name in INHERITED}


def is_there(path: str) -> bool:
    """Whether a module has a name, or a class an attribute, which its code may set on each instance."""
    with contextlib.suppress(AttributeError, ImportError):
        resolve(path)
        return True
    owner, _, name = path.rpartition("." if "." in path.partition(":")[2] else ":")
    with contextlib.suppress(AttributeError, ImportError, TypeError, OSError):
        return re.search(rf"\b{name}\b", inspect.getsource(resolve(owner))) is not None
    return False


def test_every_private_name_exists_in_this_pytorch():
    running = ".".join(torch.__version__.split(".")[:2])
    running = running if running in VERSIONS else VERSIONS[-1]
    names = [*(Name(path, name) for name, path in NAMES.items()), *ATTRIBUTES, *INHERITED]
    gone = [f"{path}: {use}" for path, use, tried in names if running in tried and not is_there(path)]
    assert gone == [], f"PyTorch {torch.__version__} has no longer"


@pytest.mark.slow
def test_a_module_is_found_regardless_of_earlier_imports():
    """Until something loads it, a module is no attribute of its package: torch._functorch.config was missing without dynamo.

    Each in a process that has only imported torch.
    """
    program = """
import os, sys
from titanlite.ground.torch_private import resolve
for path in sys.argv[1:]:
    if not (child := os.fork()):
        resolve(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""
    modules = [path for path in NAMES.values() if inspect.ismodule(resolve(path))]
    assert NAMES["partitioner"] in modules
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_removed_name_is_reported():
    for path in ("torch:_no_such_name", "torch.nn:Module._no_such_name", "torch._no_such_module:name", "torch:Tensor._no"):
        assert not is_there(path)
    assert all(hasattr(torch_private, name.use) for name in ATTRIBUTES)  # the function that uses it


CASTS = {"to", "type_as", "float", "bfloat16", "half", "contiguous"}


def returned_casts(source: str) -> list[str]:
    """The expressions with a cast that forward passes of autograd.Functions return, also by a name. See `cast_result`."""
    found = []
    for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        of_function = any("autograd.Function" in ast.unparse(base) for base in kind.bases)
        for forward in (each for each in kind.body if of_function and getattr(each, "name", "") == "forward"):
            assigned = {
                ast.unparse(node.targets[0]): node.value for node in ast.walk(forward) if isinstance(node, ast.Assign)
            }  # the last one of each name
            for returned in (node.value for node in ast.walk(forward) if isinstance(node, ast.Return) and node.value):
                for part in returned.elts if isinstance(returned, ast.Tuple) else [returned]:
                    value = assigned.get(ast.unparse(part), part)
                    if isinstance(value, ast.Call) and getattr(value.func, "attr", "") in CASTS:
                        found.append(f"{kind.name}: {ast.unparse(value)}")
    return found


def test_no_function_of_a_model_returns_a_cast_that_may_do_nothing():
    """Compiled by PyTorch 2.11, it has wrong gradients: those of attention on CPUs with context parallelism were, silently."""
    assert {file.name: found for file in (ROOT / "models").glob("*.py") if (found := returned_casts(file.read_text()))} == {}
    text = "class A(torch.autograd.Function):\n def forward(ctx, x):\n  y = x * 2\n  {}\n"
    wrong = ("return y.to(x.dtype)", "y = y.type_as(x); return y", "return x + 1, y.contiguous()")
    assert all(returned_casts(text.format(line)) for line in wrong) and not returned_casts(text.format("return y.float() + 1"))


def own_names(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of others that a file uses: attributes, and imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in own:
            yield f"line {node.lineno}: {node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            yield from (f"line {node.lineno}: {name}" for name in names if re.match(r"torch\b.*\._[^_]", name))


def strangers(files: list[Path]) -> list[str]:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    own = {name for tree in trees.values() for name in own_names(tree)} | OTHERS | INHERITED_NAMES
    return [f"{file.relative_to(ROOT)}, {use}" for file, tree in trees.items() for use in private(tree, own)]


def test_no_other_file_uses_a_private_name_of_pytorch():
    files = [file for folder in ("titanlite", "models") for file in (ROOT / folder).rglob("*.py")]
    assert strangers([file for file in files if file not in FILES]) == []
    tree = ast.parse("import torch._a\nfrom torch.b import _c\nfrom torch._d import e\nf._g = i._j\n")
    assert len(list(private(tree, set()))) == 5
