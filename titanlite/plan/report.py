"""What `titanlite estimate` prints."""

from titanlite.config.schema import Config
from titanlite.ground.torch_private import BEFORE_2_13
from titanlite.plan.moments import PHASES, MemoryEstimate, highest
from titanlite.plan.predict import Prediction
from titanlite.plan.record import Traffic

GIB = 2**30
# What no allocation of ours shows: CUDA's context, NCCL's buffers, cuBLAS's workspace, gaps in the allocator's blocks.
RESERVE = 4 * GIB


def lines(prediction: Prediction, config: Config, ranks: int, device_gib: float, routing: str = "balanced") -> list[str]:
    peak = highest(prediction.moments)
    rows = {"reserve for CUDA, NCCL": RESERVE}
    if prediction.host:
        rows["in the host's memory"] = prediction.host
    which = prediction.pipeline or "rank 0"
    return [
        f"{config.model.title}, {prediction.parameters:,} parameters, on {ranks} ranks; this is {which}",
        *(f"  {line}" for line in memory_table(prediction)),
        f"  {'peak':<24}{peak.memory.total / GIB:10.2f} GiB  {peak.phase}, {peak.name}",
        *(f"  {name:<24}{size / GIB:10.2f} GiB" for name, size in rows.items()),
        f"  FLOPs of a step         {prediction.work.flops / 1e12:8.2f} TFLOP  (matmuls and attention)",
        "  collectives of a step, and what this rank sends in them:",
        *(f"    {line}" for line in traffic_table(prediction)),
        *(f"  note: {limit}" for limit in limits(config, routing)),
        f"  {'fits' if fits(prediction, device_gib) else 'does not fit'} a device of {device_gib:g} GiB",
    ]


_ROWS = {"balanced": "the experts of every rank get as many rows", "worst": "rank 0's experts get all rows"}


def memory_table(prediction: Prediction) -> list[str]:
    """What the rank holds at the worst moment of each phase, in GiB."""
    phases = [phase for phase in PHASES if any(each.phase == phase for each in prediction.moments)]
    held = [prediction.during(phase) for phase in phases]
    rows = [*zip(MemoryEstimate._fields, zip(*held, strict=True), strict=True), ("total", [each.total for each in held])]
    return [
        f"{'GiB, the most in each:':<24}" + "".join(f"{phase:>10}" for phase in phases),
        *(f"{name:<24}" + "".join(f"{size / GIB:10.2f}" for size in sizes) for name, sizes in rows),
    ]


def fits(prediction: Prediction, device_gib: float) -> bool:
    return prediction.memory.total + RESERVE <= device_gib * GIB


def traffic_table(prediction: Prediction) -> list[str]:
    """One line a channel, the largest first, then the total."""
    rows = sorted(prediction.work.traffic.items(), key=lambda row: -row[1].sent)
    total = Traffic(*map(sum, zip((0, 0, 0), *(traffic for _, traffic in rows), strict=True)))
    groups = {channel: f"{' x '.join(channel.over)} ({channel.ranks})" for channel, _ in rows}
    width = max([34, *(len(each.sender) + 2 for each, _ in rows)])
    return [
        *(f"{each.sender:<{width}}{each.kind:<16}{groups[each]:<34}{_amount(traffic)}" for each, traffic in rows),
        f"{'total':<{width + 50}}{_amount(total)}",
    ]


def _amount(traffic: Traffic) -> str:
    return f"{traffic.calls:>7} x{traffic.sent / GIB:>12,.3f} GiB"


def limits(config: Config, routing: str = "balanced") -> list[str]:
    """What the prediction leaves out, takes from another device, or supposes."""
    found = ["as on CUDA; gaps in the allocator's blocks are not in it"]
    if config.model.attention == "efficient":
        found.append('model.attention = "efficient": masks, and in 16 bits repeated keys and values, are left out')
    if config.compile.enable and BEFORE_2_13:
        found.append("compilation is left out before PyTorch 2.13; a compiled block keeps less")
    if config.parallelism.expert_parallel_degree > 1:
        found.append(f"--routing {routing}: FLOPs and collectives if {_ROWS[routing]}; the memory is enough for any routing")
    if config.compile.enable and config.parallelism.enable_async_tensor_parallel:
        found.append("enable_async_tensor_parallel: the compiler splits collectives of tp into pieces; here they are whole")
    if config.parallelism.cpu_offload:
        found.append("cpu_offload: masters, moments and reduced gradients are on the host; copies to and from it are left out")
    return found
