"""training.predict_further: multi-token prediction compared with a plain loop and with one process, and what is refused."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from models.attention import SeqInfo
from models.further import further_of
from models.head import IGNORE
from tests import tiny
from tests.distributed import cells
from tests.distributed.as_one import as_one_process, trajectory_of
from tests.distributed.cover import PLAIN
from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import CPU, GRAPHS, config_of, degrees_of
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, reports, resumes_once, run
from tests.distributed.test_variants import MOE, SHARD, SPLIT
from tests.forks.right import value_residual
from tests.repetitions import slow_but
from titanlite.checkpoint import manifest
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.hf import export as exporting
from titanlite.loop.checks import check
from titanlite.loop.loss import faults
from titanlite.optim.build import is_orthogonalized
from titanlite.parallel.mesh import ranks_of
from titanlite.parallel.tensor import sharding_faults, styles_of
from titanlite.plan.predict import predict
from titanlite.registry.family import family_names, family_of
from titanlite.tools.open_model import open_model
from titanlite.transforms.initialize import match_initial
from titanlite.transforms.meta import on_meta, training_flops
from titanlite.verify.compare import Trajectory, compare, replaced

HERE = "tests.own.test_further"
DEPTHS, WEIGHT = 2, 0.6
FLOAT32 = {"mixed_precision_param": "float32"}


def configured(degrees: dict[str, int], flavor: str = "plain", accumulation: int = 1, **keys: Any) -> Config:
    training = {"steps": 3, "predict_further": DEPTHS, "predict_further_weight": WEIGHT}
    sections = {**keys, "training": training | keys.get("training", {})}
    return config_of(degrees, sections.pop("flavor", flavor), accumulation, **sections)


def test_a_familys_pattern_for_all_norms_is_not_that_of_the_modules(monkeypatch):
    """Split over tensor parallelism, their hidden states did not fit those of the block: a traceback in the first step."""
    theirs = tiny.sharding
    monkeypatch.setattr(tiny, "sharding", lambda config: {"*norm": "sequence", **theirs(config)})
    config = configured({})
    family = family_of(config.model)
    found, wrong = styles_of(on_meta(family, config), family)
    assert {found[f"further.{name}_norm"] for name in ("3.hidden", "3.embed")} == {"replicate"} and not wrong


# -------------------------------------------------------------------------------------------------------------- a plain loop


def plain_losses(config: Config, weights: dict[str, Tensor], tokens: Tensor) -> tuple[Any, list[Tensor]]:
    """The model in float64, and the mean loss of the next token and of each MTP module, one position after another."""
    model = on_meta(family_of(config.model), config)
    model.load_state_dict({name: value.double() for name, value in weights.items()}, assign=True)
    model.requires_grad_()
    length = tokens.shape[1] - 1
    seq, given = SeqInfo(torch.arange(length).expand(len(tokens), -1)), []
    [*model.layers.values()][-1].register_forward_hook(lambda _, args, out: given.append((args, out)))
    model(tokens[:, :-1], seq)
    (_, *others), hidden = given[0]
    assert model.head is not None
    losses = [F.cross_entropy(model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())]
    for depth, each in enumerate(further_of(model).values(), 1):
        read = [[tokens[row, min(i + depth, length - 1)] for i in range(length)] for row in range(len(tokens))]
        hidden = each(hidden, model.embed(torch.tensor(read)), *others)
        logits = model.head(hidden).log_softmax(-1)
        counted = [(row, i) for row in range(len(tokens)) for i in range(length - depth)]
        losses.append(torch.stack([-logits[row, i, tokens[row, i + depth + 1]] for row, i in counted]).mean())
    return model, losses


def test_loss_and_gradients_are_those_of_a_plain_loop_in_float64(pools):
    config = configured(ONE)
    found = trajectory_of(pools, ONE, config)
    model, losses = plain_losses(config, found.weights, found.batches[0])
    loss = losses[0] + WEIGHT / DEPTHS * sum(losses[1:])
    loss.backward()
    assert found.losses[0] == pytest.approx(loss.item(), rel=2e-6)
    assert any(name.startswith("further.3.block.") for name in found.gradients)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (found.gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_labels_end_with_their_row_and_their_document():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (2, 13), generator=draw)
    documents = torch.tensor([[0] * 5 + [1] * 2 + [2] * 5, [0] * 12], dtype=torch.int32)
    counted = torch.rand(2, 13, generator=draw) < 0.8
    counted[0, [5, 7, 12]] = False  # the first token of a document is not a label
    batch = Batch(tokens, counted, documents)
    for depth in (1, 2, 3):
        read, labels = batch.further(depth)
        for row in range(2):
            for i in range(12):
                ahead = i + depth
                inside = ahead < 12 and documents[row, ahead] == documents[row, i] and counted[row, ahead + 1]
                assert labels[row, i] == (tokens[row, ahead + 1] if inside else IGNORE)
                assert ahead >= 12 or read[row, i] == tokens[row, ahead]


@pytest.mark.parametrize("name", family_names())
def test_the_tables_of_every_family_cover_its_mtp_modules(name):
    config = config_of({}, model={"name": name, "flavor": "debug"}, training={"predict_further": DEPTHS})
    family = family_of(config.model)
    model = on_meta(family, config)
    assert match_initial(model, family)[1] == sharding_faults(model, family, 2) == []
    ours = [(each.shape, each.dtype) for each in further_of(model)[str(len(model.layers))].block.parameters()]
    assert ours == [(each.shape, each.dtype) for each in [*model.layers.values()][-1].parameters()]


def test_muon_updates_the_matrices_of_mtp_modules():
    config = configured(ONE, optimizer={"name": "Muon"})
    model = on_meta(family_of(config.model), config)
    matrices = {n for n, p in model.named_parameters() if is_orthogonalized(n, p, config.optimizer)}
    assert matrices == {n for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith(("embed.", "head."))}
    assert "further.3.projection.weight" in matrices


# -------------------------------------------------------------------------------------------------------------------- meshes

CELLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp 2": ({"cp": 2}, {}),
    "ep 2": (SPLIT, {**MOE, "moe": {"balance_loss": 0.01}}),
    "shard 2 x tp 2": (TWO_BY_TWO, {"flavor": "uneven"}),
    "shard 2, tied, resharded, accumulated": (
        {"dp_shard": 2},
        {"flavor": "tied", "accumulation": 2, "parallelism": {"fsdp_reshard_after_forward": "always"}},
    ),
    "replicate 2 x shard 2, tied, accumulated": (
        {"dp_replicate": 2, "dp_shard": 2},
        {"flavor": "tied", "accumulation": 2},
    ),
    "shard 2 x cp 2, recomputed": ({"dp_shard": 2, "cp": 2}, {"activation_checkpoint": {"mode": "full"}}),
    "shard 2, per operation, compiled": (
        {"dp_shard": 2},
        {"activation_checkpoint": {"mode": "selective"}, "compile": {"enable": True, "backend": "aot_eager"}},
    ),
    "tp 2, latents": ({"tp": 2}, {"model": {"name": "tests.tiny_deepseek_v3"}}),
    "2 x 2, Muon": (TWO_BY_TWO, {"optimizer": {"name": "Muon", "implementation": "for-loop"}}),
}


@pytest.mark.parametrize("cell", slow_but(["cp 2", "ep 2", "shard 2 x tp 2"], CELLS))
def test_a_mesh_trains_as_one_process_does(pools, cell):
    degrees, keys = CELLS[cell]
    found, _ = as_one_process(pools, degrees, lambda mesh: configured(mesh, **keys))
    assert any(name.startswith("further.") for name in found.gradients)


@pytest.mark.parametrize("mesh", slow_but(["context 2"], ["context 2", "replicate 2 x shard 2"]))
def test_a_mesh_trains_on_documents_as_one_process_does(pools, mesh):
    """The number of labels of an MTP module then differs between ranks, and does not follow from rows and depth."""

    def run(mesh: str) -> Trajectory:
        cell = PLAIN | {"mesh": mesh, "documents": "many", "accumulation": "2"}
        config = replaced(cells.config_of_cell(cell), training={"predict_further": DEPTHS, "predict_further_weight": WEIGHT})
        size = ranks_of(degrees_of(mesh))
        return pools[size].run("tests.distributed.cells:trajectory", cell=cell, config=config)[0][0]

    assert [str(each) for each in compare(run(mesh), run("one process")).excessive] == []


def test_blocks_of_mtp_modules_need_no_graph_of_their_own(pools):
    config = configured(ONE, compile={"enable": True, "backend": "aot_eager"})
    assert pools[1].run("tests.distributed.scenarios:trajectory", degrees=ONE, config=config)[0][1] == GRAPHS


@pytest.mark.parametrize(("name", "precision"), [("tests.tiny", "float16"), ("tests.forks.tied_in_constructor", "bfloat16")])
def test_another_precision_differs_by_its_rounding(pools, name, precision):
    """The fork's embedding has its own class: only the model's forward pass cast its parameters, and the MTP module failed."""
    training = {"mixed_precision_param": precision, "steps": 1}
    config = configured(ONE, training=training, model={"name": name})
    found, exact = (trajectory_of(pools, ONE, each) for each in (config, replaced(config, training=training | FLOAT32)))
    assert found.losses[0] == pytest.approx(exact.losses[0], rel=5e-3)
    assert found.norms[0] == pytest.approx(exact.norms[0], rel=6e-2)


# ------------------------------------------------------------------------------------------------ runs and their checkpoints


def test_a_run_reports_the_mtp_loss_resumes_bit_for_bit_and_exports_a_model_without_mtp(pools, tmp_path, caplog, monkeypatch):
    keys: dict[str, Any] = {"training": {"predict_further": 1, "predict_further_weight": WEIGHT}}
    keys["validation"] = {"enable": True, "steps": 1, "freq": STEPS}
    keys["optimizer"] = {"ema_decay": 0.9, "groups": [{"pattern": "further.*", "lr": 0.5}]}  # which no opened model has
    resumes_once(pools, SHARD, tmp_path, **keys)
    first, *_, last = reports(tmp_path / "whole")
    own = last["loss"] - WEIGHT * last["further_loss"]  # before the update of this step
    assert last["validation_loss"] == pytest.approx(own, rel=0.1)
    assert 0 < last["further_loss"] < first["further_loss"]

    checkpoint = tmp_path / f"whole/checkpoint/step-{STEPS:08d}"
    of_the_run = manifest.read(checkpoint).numbers["data"]["tokenizer"]  # the tokens come from no tokenizer
    monkeypatch.setattr("titanlite.data.sources.tokenizer_digest", lambda _: of_the_run)
    exported = exporting.export(checkpoint, tmp_path / "hf", named="tests.tiny")
    assert "training.predict_further are not exported" in caplog.text
    assert not any("further" in name for name in load_file(exported[0]))
    for average in (False, True):
        model = pools[1].run(f"{HERE}:names_of", source=checkpoint, average=average)[0]
        assert model and not any(name.startswith("further.") for name in model)
    with pytest.raises(WorkerFailure, match=r"training\.predict_further = 2, was 1: .*other parameters"):
        run(pools, SHARD, tmp_path / "parts", STEPS + 1, **{**keys, "training": {"predict_further": 2}})


def names_of(source: Path, average: bool) -> list[str]:
    with patch("titanlite.data.sources.tokenizer_digest", lambda _: "no tokenizer"):
        opened = open_model(source, CPU, "float32", name="tests.tiny", average=average)
    return [name for name, _ in opened.model.named_parameters()]


# ---------------------------------------------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "a pipeline": (2, {"parallelism": {"pipeline_parallel_degree": 2}}, "parallelism.pipeline_parallel_degree = 2"),
    "LoRA": (1, {"lora": {"enable": True}}, "lora.enable = true"),
    "a teacher": (1, {"distillation": {"teacher": "nowhere"}}, 'distillation.teacher = "nowhere"'),
    "short rows": (1, {"training": {"seq_len": 2}}, "training.seq_len = 2"),
    "muP": (1, {"model": {"overrides": {"mup_base_dim": 32}}}, "model.overrides.mup_base_dim"),
}


def faults_of(folder: Path, ranks: int, **keys: Any) -> list[str]:
    """The faults that name the number of MTP modules."""
    model = {"name": "tests.tiny", "flavor": "large", **keys.pop("model", {})}
    training = {"local_batch_size": 2, **keys.pop("training", {})}
    config = configured({}, training=training, model=model, job={"dump_folder": str(folder)}, **keys)
    with pytest.raises(ValueError) as refused:
        check(config, "run.toml", ranks, open_files=False)
    return [line for line in str(refused.value).splitlines() if f"training.predict_further = {DEPTHS}" in line]


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_exclude_mtp_are_refused_with_both_keys(tmp_path, case):
    ranks, keys, named = REFUSED[case]
    (fault,) = faults_of(tmp_path, ranks, **copy.deepcopy(keys))
    assert named in fault


def test_a_model_whose_blocks_cannot_be_separated_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "LIMITS", {"stages": False}, raising=False)
    (fault,) = faults_of(tmp_path, 1)
    assert "LIMITS of tests.tiny" in fault


class NormAfterBlocks(tiny.Model):
    """Its forward ends with the norm, so that hidden states of MTP modules would have none."""

    def __init__(self, config):
        super().__init__(config)
        self.norm, self.head.norm = self.head.norm, torch.nn.Identity()

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        return self.norm(super().forward(x, seq))


@pytest.mark.parametrize(
    "model, reason",
    [
        (NormAfterBlocks, "changes what its last block returns, and not what that of an MTP module does"),
        (value_residual.Model, "the last block of tests.tiny does not return hidden states alone"),
    ],
)
def test_a_model_that_mtp_modules_cannot_continue_is_refused(monkeypatch, model, reason):
    """The first one had trained, without a norm in front of the head of each MTP module."""
    monkeypatch.setattr(tiny, "Model", model)
    config = configured({})
    (fault,) = faults(config, family := family_of(config.model), on_meta(family, config))
    assert fault.startswith(f"training.predict_further = {DEPTHS}: ") and reason in fault


def test_a_model_that_loops_over_its_blocks_has_mtp_modules():
    config = configured({}, model={"name": "tests.forks.right.looped"})
    assert [*faults(config, family := family_of(config.model), on_meta(family, config))] == []


# ---------------------------------------------------------------------------------------------------------------- predictions


@pytest.mark.slow
def test_predicted_and_reported_flops_count_projections_blocks_and_head_of_mtp_modules():
    plain, config = (configured({"dp_shard": 2}, training={"predict_further": depths}) for depths in (0, DEPTHS))
    without, found = (predict(each, 2, "cpu") for each in (plain, config))
    family = family_of(config.model)
    c, length = family.config, config.training.seq_len
    block = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads) + 3 * c.dim * c.ffn_dim
    matrices = DEPTHS * (2 * c.dim * c.dim + block)
    numbers = 6 * (matrices + DEPTHS * c.dim * c.vocab_size) + 12 * DEPTHS * c.n_heads * c.head_dim * length
    assert training_flops(family, config).palm - training_flops(family, plain).palm == numbers
    tokens = config.training.local_batch_size * length
    # the backward pass of a fused attention kernel recomputes the scores
    assert found.work.flops - without.work.flops == pytest.approx(tokens * numbers, rel=0.02)
    norms = DEPTHS * 4 * c.dim
    assert found.memory.masters - without.memory.masters == 4 * (matrices + norms) // 2
    assert found.memory.activations > without.memory.activations * (1 + DEPTHS / c.n_layers)
