"""Runs training steps on a simulated GPU, compiled by inductor, and its Triton kernels down to machine code for sm_90.

    LD_PRELOAD=noop_cuda.so python -m tests.cuda_shim.inductor CASE...

prints a JSON object a case: {"case": ..., "regions": {region: [{"name": ..., "registers": ..., ...}]}}. kernels.py starts it.

No driver is needed: inductor generates its code from the properties of the device, Triton compiles for a target, and ptxas is
in Triton's wheel. The program that inductor generates from a graph is not run; the graph itself runs instead.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tests.cuda_shim import pretend

pretend.install(inductor=True)

import triton  # noqa: E402  # after install
import triton.backends  # noqa: E402
from torch._functorch.aot_autograd import get_aot_graph_name  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from models import llama3  # noqa: E402
from tests.cuda_shim.kernels import CASES  # noqa: E402
from titanlite.config.schema import Config  # noqa: E402
from titanlite.data.batch import Batch  # noqa: E402
from titanlite.loop.step import forward_backward, update  # noqa: E402
from titanlite.optim.build import build_optimizer  # noqa: E402
from titanlite.parallel import parallelize as order  # noqa: E402
from titanlite.parallel.mesh import DIMENSIONS, build_mesh  # noqa: E402
from titanlite.plan.step import simulated_ranks  # noqa: E402
from titanlite.registry.family import family_of  # noqa: E402
from titanlite.transforms.dtypes import DTYPES  # noqa: E402
from titanlite.transforms.meta import on_meta  # noqa: E402
from titanlite.transforms.parameters import allocate  # noqa: E402

DEVICE = pretend.DEVICE
_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"

# ------------------------------------------------------------------------------------------- inductor and Triton without a GPU


class _Driver:
    """In place of Triton's driver, which loads libcuda.so."""

    utils = None

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _OnCPU(TorchDispatchMode):
    """Creates tensors on the CPU, since inductor folds constants by computing them on the device of the graph."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return operation(*args, **kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {}))


_regions: dict[str, str] = {}  # the program of each compiled region
_functions: dict[str, str] = {}  # the function that each graph of AOTAutograd was made from
_FRAME = re.compile(r'File "(.+)", line \d+, in (\w+)')
_deduce = UniformValueConstantFolder._deduce_value


def _folded(folder: Any, node: Any) -> Any:
    with _OnCPU():
        return _deduce(folder, node)


def _kept(graph: GraphLowering) -> Any:
    """In place of `compile_to_module`: keeps the program, and lets the graph run in its place."""
    program, _ = graph.codegen()
    number = get_aot_graph_name().split("_")[2]
    if not graph.is_backward:
        traces = (node.stack_trace for node in graph.orig_gm.graph.nodes)
        frame = _FRAME.search(next(filter(None, traces)))
        assert frame is not None
        _functions[number] = f"{Path(frame[1]).stem}.{frame[2]}"
    name = f"{_functions[number]}, {'backward' if graph.is_backward else 'forward'}"
    same = sum(other.partition(" #")[0] == name for other in _regions)
    _regions[f"{name} #{same + 1}" if same else name] = program.value
    interpreted = graph.orig_gm

    def call(args: list[Any]) -> Any:
        given = list(args)
        args.clear()  # as inductor's program does
        return interpreted(*given)

    return types.SimpleNamespace(call=call)


def _prepare(folder: str) -> None:
    nvidia = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = dataclasses.replace(nvidia, driver=_Driver)
    triton.runtime.driver.set_active(_Driver())
    triton.knobs.cache.dir = f"{folder}/triton"
    inductor.compile_threads = 1
    inductor.fx_graph_cache = inductor.use_static_cuda_launcher = False
    UniformValueConstantFolder._deduce_value = _folded  # type: ignore[method-assign]
    GraphLowering.compile_to_module = _kept  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------- kernels of a region

_CALL = re.compile(r"(triton_\w+)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+)\(|\b(cpp_fused\w*)\(")
_SOURCE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def kernels_of(program: str, folder: str) -> list[dict[str, Any]]:
    """The calls of inductor's program, in order; Triton kernels with registers and spilled bytes per thread, and shared bytes
    per block.

    The largest values over the configurations from which autotuning on a GPU would choose.
    """
    sources = dict(_SOURCE.findall(program))
    calls = ["".join(groups) for groups in _CALL.findall(program[program.index("def call(") :])]
    usage = {name: _usage(name, source, folder) for name, source in sources.items()}
    return [{"name": name, **usage.get(name, {})} for name in calls]


def _usage(name: str, source: str, folder: str) -> dict[str, int]:
    heuristics = getattr(PyCodeCache.load(source.replace("\\\\", "\\")), name)
    registers, spilled, shared = [], [], []
    for config in heuristics.configs:
        cubin = Path(folder) / "cubin"
        kernel = heuristics._precompile_config(config).kernel
        cubin.write_bytes(kernel.asm["cubin"])
        shared.append(kernel.metadata.shared)
        text = subprocess.run([_BIN / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
        found = _USAGE.search(text.stdout)
        assert found is not None, text.stdout
        registers.append(int(found[1]))
        spilled.append(int(found[2]))
    largest = {"registers": max(registers), "spilled": max(spilled), "shared": max(shared)}
    return {"configurations": len(registers), **largest}


# --------------------------------------------------------------------------------------------------------------------- steps


def _on_meta(family: Any, config: Config) -> Any:
    """One layer of each window, since all others reuse its code; outside of the fake mode, which gives no memory."""
    with unset_fake_temporarily():
        model = on_meta(family, config)
    window_of = getattr(family.config, "window_of", lambda layer: None)
    seen = set()
    for name in list(model.layers):
        if (window := window_of(int(name))) in seen:
            del model.layers[name]
        seen.add(window)
    return model


def step(config: Config, parts: list[str]) -> None:
    """These parts of a training step, as in CASES."""
    family, training = family_of(config.model), config.training
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with simulated_ranks(1), mock.patch.object(order, "on_meta", _on_meta):
        mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), "cuda")
        with fake:
            model = order.parallelize(family, config, mesh, DEVICE)
            allocate(model, DEVICE)
            if "model" in parts:
                shape = 1, training.local_batch_size, training.seq_len
                documents = torch.zeros(shape, dtype=torch.int32, device=DEVICE) if training.document_mask else None
                tokens = torch.zeros(*shape[:2], shape[2] + 1, dtype=torch.int64, device=DEVICE)
                forward_backward(model, Batch(tokens, None, documents), mesh)
            if "optimizer" in parts:
                optimizer = build_optimizer(model, config.optimizer, DTYPES[training.mixed_precision_param])
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter)
                update(model, optimizer, config.optimizer.lr, training.max_norm)


class _WithFallback(torch.nn.Module):
    """The planted fault: a feed-forward layer with an operation that falls back to PyTorch."""

    def __init__(self, real: Any, *sizes: int):
        super().__init__()
        self.w1, self.w2, self.w3 = real(*sizes).children()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.w1(x) * self.w3(x)
        return self.w2(hidden + hidden.detach().sort(dim=-1).values)  # Triton sorts rows of at most 512


def main() -> None:
    for name in sys.argv[1:]:
        case = CASES[name]
        _regions.clear()
        torch._dynamo.reset()
        planted = mock.patch.object(llama3, "SwiGLU", lambda *sizes, real=llama3.SwiGLU: _WithFallback(real, *sizes))
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
            _prepare(folder)
            with planted if case.get("planted") else mock.patch.dict({}):
                step(Config.model_validate(case["config"]), case["parts"])
            regions = {region: kernels_of(program, folder) for region, program in _regions.items()}
        print(json.dumps({"case": name, "regions": regions}), flush=True)


if __name__ == "__main__":
    main()
