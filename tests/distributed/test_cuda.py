"""What only a GPU can show, on one of them: no step waits for it, offload changes nothing, a tiny run equals the CPU's."""

import pytest
import torch

from tests.distributed.scenarios import config_of, learnable_data
from titanlite import process
from titanlite.config import Config
from titanlite.data.batches import batches
from titanlite.lr_schedule import build_schedule
from titanlite.mesh import DIMENSIONS, build_mesh
from titanlite.optimizer import build_optimizer, create_state
from titanlite.tools.verify import Trajectory, compare, record
from titanlite.train import build_model, forward_backward, update
from titanlite.zoo import load_family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def group():
    process.start(Config())
    yield
    process.finish()


def trajectory(device: str, **sections) -> Trajectory:
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), device)
    return record(config_of({}, **sections), learnable_data(512), mesh, torch.device(device))


def test_a_step_that_is_not_reported_never_waits_for_the_device():
    device = torch.device("cuda")
    config = config_of({}, accumulation=2, training={"mixed_precision_param": "bfloat16"})
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), "cuda")
    model = build_model(load_family("tests.tiny", "plain"), config, mesh, device)
    optimizer, schedule = build_optimizer(model, config.optimizer), build_schedule(config)
    create_state(optimizer)
    source = batches(learnable_data(512), 0, 8, 4, 32, 0, (0, 1), pin_memory=True)

    def step(number: int) -> None:
        tokens = next(source).to(device, non_blocking=True)
        forward_backward(model, tokens, mesh)
        update(model, optimizer, schedule.at(number), config.training.max_norm)

    step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_gives_the_first_weights_bit_for_bit_and_the_losses_of_a_cpu():
    torch.backends.cuda.matmul.allow_tf32 = False
    result = compare(trajectory("cuda"), trajectory("cpu"))
    assert result.weights == [] and result.batches == []
    assert result.loss < 1e-4
    assert result.gradient < 1e-4, result.worst


def test_offload_to_the_cpu_changes_nothing():
    offloaded = trajectory("cuda", parallelism={"cpu_offload": True})
    assert compare(offloaded, trajectory("cuda")).equal
