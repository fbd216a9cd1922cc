"""torch.cuda of a simulated H100, for a process with the library of build.py preloaded. Its tensors are FakeTensorMode's."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

DEVICE = torch.device("cuda", 0)
# Called with names such as "Event.synchronize()" whenever the host would wait. Forbidden in steps (watch.py), not in reports.
sync_listeners: list[Callable[[str], None]] = []
_aten = torch.ops.aten


def _host_sync(what: str) -> None:
    for listener in sync_listeners:
        listener(what)


class Stream:
    """A stream whose kernels have run, with what other streams had queued when it waited for them.

    `done`: the number of the latest kernel; `seen`: the latest kernel of each other stream that runs before all later ones.
    """

    device, device_index, device_type, cuda_stream, stream_id = DEVICE, 0, 1, 0, 0

    def __init__(self, *_: Any, **__: Any):
        self.done, self.seen = 0, dict[Stream, int]()

    def comes_after(self, stream: "Stream", number: int) -> bool:
        """Whether kernels queued now run after that kernel."""
        return stream is self or number <= self.seen.get(stream, 0)

    def state(self) -> "dict[Stream, int]":
        return {**self.seen, self: self.done}

    def wait(self, state: "dict[Stream, int]") -> None:
        for stream, number in state.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait(other.state())

    def wait_event(self, event: "Event") -> None:
        self.wait(event.state)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _host_sync("Stream.synchronize()")

    def __enter__(self) -> "Stream":
        _streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _streams.pop()


class Event:
    """An event that has completed."""

    def __init__(self, *_: Any, **__: Any):
        self.state: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> "Event":
        self.state = (stream or current_stream()).state()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _host_sync("Event.synchronize()")

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


_streams = [Stream()]  # the default one, and those that the program has entered


def current_stream(device: Any = None) -> Stream:
    return _streams[-1]


def default_stream(device: Any = None) -> Stream:
    return _streams[0]


class Properties:
    """Device properties of an H100, as reported by NVIDIA's driver."""

    name, major, minor, multi_processor_count, gcnArchName = "NVIDIA H100 80GB HBM3", 9, 0, 132, ""
    total_memory, L2_cache_size, memory_bus_width = 80 * 2**30, 50 * 2**20, 5120
    clock_rate, memory_clock_rate = 1_980_000, 2_619_000  # kHz
    warp_size, max_threads_per_multi_processor, max_threads_per_block, regs_per_multiprocessor = 32, 2048, 1024, 65536
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472


_OF_CUDA: dict[str, Any] = {
    "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
    "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
    "_exchange_device": lambda device: 0, "_maybe_exchange_device": lambda device: 0,
    "get_device_capability": lambda device=None: (9, 0), "get_device_name": lambda device=None: Properties.name,
    "get_device_properties": lambda device=None: Properties, "is_bf16_supported": lambda *_, **__: True,
    "Stream": Stream, "Event": Event, "stream": lambda stream=None: stream or contextlib.nullcontext(),
    "current_stream": current_stream, "default_stream": default_stream,
    "set_stream": lambda stream: None, "synchronize": lambda device=None: _host_sync("torch.cuda.synchronize()"),
    "is_current_stream_capturing": lambda: False, "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
    "mem_get_info": lambda device=None: (Properties.total_memory, Properties.total_memory),
    "manual_seed_all": lambda seed: None, "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
}  # fmt: skip
_OF_C: dict[str, Any] = {
    "_cuda_getDevice": lambda: 0, "_cuda_getDeviceCount": lambda: 1, "_cuda_setDevice": lambda device: None,
    "_cuda_exchangeDevice": lambda device: 0, "_cuda_maybeExchangeDevice": lambda device: 0,
    "_cuda_getCurrentRawStream": lambda device: 0, "_cuda_isCurrentStreamCapturing": lambda: False,
}  # fmt: skip


def install(inductor: bool = False) -> None:
    """Once in a process, after `import torch` and before titanlite and models are imported.

    inductor: leaves torch.compile as it is, for a process that has Triton; otherwise "aot_eager" replaces "inductor".
    """
    for name, value in _OF_CUDA.items():
        setattr(torch.cuda, name, value)
    for name, value in _OF_C.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, value)
    torch.version.cuda = torch.version.cuda or "13.0"
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # there is nothing to initialize
    torch.Tensor.record_stream = lambda tensor, stream: None
    DeviceMesh._concatenate = staticmethod(_on_real_numbers(DeviceMesh._concatenate))
    DeviceMesh._flatten = _on_real_numbers(DeviceMesh._flatten)
    DeviceMesh._unflatten = _on_real_numbers(DeviceMesh._unflatten)
    DeviceMesh.mesh = property(_on_real_numbers(DeviceMesh.mesh.fget))
    F.scaled_dot_product_attention = torch.compiler.allow_in_graph(_attention)
    for name in _ATTENTION:
        setattr(torch.backends.cuda, f"can_use_{name}_attention", _check_of(name))
    if not inductor:
        torch.compile = _with_aot_eager(torch.compile)


def _on_real_numbers(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a mesh from others, or the tensor of its ranks, which is read on the host."""

    def made(*args: Any) -> Any:
        with unset_fake_temporarily():
            return make(*args)

    return made


def _with_aot_eager(compile: Any) -> Any:
    def compiled(function: Any, **options: Any) -> Any:
        options.pop("options", None)  # inductor's
        return compile(function, **{**options, "backend": options.get("backend", "aot_eager").replace("inductor", "aot_eager")})

    return compiled


# ------------------------------------------------------------------------------------------------------ kernels of attention

# In the order in which PyTorch prefers them on Hopper; a CPU build has none of them and reports that none can be used. The
# rules are those of its sdp_utils.cpp that our shapes meet. cuDNN's kernels also take some masks; nothing here relies on it.
_ATTENTION: dict[str, Callable[[torch.dtype, int, bool, bool], bool]] = {
    "cudnn": lambda dtype, head_dim, grouped, masked: dtype != torch.float32 and head_dim % 8 == 0 and not masked,
    "flash": lambda dtype, head_dim, grouped, masked: dtype != torch.float32 and head_dim <= 256 and not masked,
    "efficient": lambda dtype, head_dim, grouped, masked: head_dim * dtype.itemsize % 16 == 0 and not grouped,
}


def _check_of(name: str) -> Callable[..., bool]:
    """torch.backends.cuda.can_use_..._attention."""

    def can_use(params: Any, debug: bool = False) -> bool:
        q = params.query
        return _ATTENTION[name](q.dtype, q.shape[-1], params.enable_gqa, params.attn_mask is not None)

    return can_use


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention, with the enabled kernel that PyTorch would choose on Hopper."""
    enabled = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
    }
    shapes = q.dtype, q.shape[-1], enable_gqa, attn_mask is not None
    kernel = next((name for name, takes in _ATTENTION.items() if q.is_cuda and enabled[name] and takes(*shapes)), "math")
    if kernel == "math":
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")  # PyTorch's own words
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _aten._scaled_dot_product_attention_math(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
    if kernel == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
