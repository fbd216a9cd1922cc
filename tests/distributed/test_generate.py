"""Generation on a mesh: the text of one process, in inference and during training."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models.attention import Cache
from tests.distributed.scenarios import CPU, config_of, mesh_of
from titanlite.inference.generate import Sampling, generate
from titanlite.loop.step import build_model
from titanlite.registry.family import load_family

HERE = "tests.distributed.test_generate"
PROMPTS = [[5], list(range(100, 123)), [7, 8, 9, 400]]


def texts(degrees: dict[str, int], module: str, sampling: Sampling, step: int, compiled: bool = False) -> list[list[int]]:
    """The text of a model with random weights on a mesh, with FSDP2 as in training; step: of the cache."""
    Cache._STEP = step
    config = config_of(
        degrees, model={"name": module}, compile={"enable": compiled, "backend": "aot_eager"}, training={"seed": 5}
    )
    mesh = mesh_of(degrees)
    model = build_model(load_family(module, "plain"), config, mesh, CPU)
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.wo.weight", "ffn.w2.weight", "experts.w2")):
            parameter.data.mul_(10)  # larger than the embedding, or the last token would repeat itself
        elif name.endswith("post_norm.weight"):
            parameter.data.add_(10)
    return generate(model, PROMPTS, 24, (), sampling)


@pytest.mark.parametrize(
    ("module", "degrees"),
    [
        ("tests.tiny_gemma3", {"dp_shard": 2}),
        ("tests.tiny", {"dp_shard": 2, "tp": 2}),
        ("tests.forks.right.linear_attention", {"tp": 2}),  # padding must not change its state
        pytest.param("tests.tiny_olmo2", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("tests.tiny_moe", {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mesh_generates_the_text_of_one_process(pools, module, degrees):
    for sampling in (Sampling(temperature=0), Sampling(seed=1, top_k=50)):
        keys = {"module": module, "sampling": sampling, "step": 16}
        expected = pools[1].run(f"{HERE}:texts", degrees={}, **keys)[0]
        found = pools[math.prod(degrees.values())].run(f"{HERE}:texts", degrees=degrees, **keys)
        assert all(rank == expected for rank in found)
        assert all(len(set(new)) > 3 for new in expected)


def test_a_compiled_model_generates_the_same_text_without_compiling(pools):
    keys = {"module": "tests.tiny", "sampling": Sampling(temperature=0), "step": 16}
    degrees = {"tp": 2}
    plain = pools[2].run(f"{HERE}:texts", degrees=degrees, **keys)[0]
    assert pools[2].run(f"{HERE}:texts", degrees=degrees, compiled=True, **keys)[0] == plain


def samples(folder: Path) -> dict[int, str]:
    """TensorBoard's texts for the first prompt, by step."""
    board = EventAccumulator(str(folder / "tb")).Reload()
    return {event.step: event.tensor_proto.string_val[0].decode() for event in board.Tensors("sample/0/text_summary")}


def test_samples_during_training_do_not_change_training(pools, tmp_path):
    degrees = {"tp": 2}

    def run(name: str, **validation) -> list[str]:
        config = config_of(
            degrees,
            "large",
            job={"dump_folder": str(tmp_path / name)},
            training={"steps": 4},
            compile={"enable": True, "backend": "aot_eager"},
            metrics={"log_freq": 1},
            validation={"enable": True, "freq": 2, "steps": 1, **validation},
        )
        pools[2].run("tests.distributed.scenarios:full_run", degrees=degrees, config=config)
        return [line.split('"lr"')[0] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    assert run("with", sample_prompts=["def ", ""], sample_tokens=6) == run("without")
    found = samples(tmp_path / "with")
    assert list(found) == [2, 4]
    assert all(text.startswith("    def ") and len(text) > 10 for text in found.values())
