"""[distillation]: a model with a frozen teacher, compared with formulas and with one process, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from models import llama3
from models.attention import SeqInfo
from models.blocks import RMSNorm
from models.decoder import Decoder
from models.head import IGNORE, Head, Sizes, distilled
from tests import tiny
from tests.distributed.as_one import as_one_process, trajectory_of
from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import config_of, learnable_data
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, resumes_once, run
from tests.distributed.test_variants import MOE, SHARD, SPLIT
from tests.own.test_loss import OwnLossHead, ScaledHead, with_head
from tests.repetitions import slow_but
from titanlite.config.schema import Config
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.hf.folder import each_expert, find_weights, their_name
from titanlite.hf.load import load_weights
from titanlite.loop.checks import check
from titanlite.loop.resume import Progress, RunIdentity, changes, numbers_of
from titanlite.optim.lr_schedule import build_schedule
from titanlite.plan.predict import predict
from titanlite.registry.family import Family, family_of, load_family
from titanlite.registry.teacher import config_of_teacher
from titanlite.transforms.initialize import initialize
from titanlite.transforms.meta import training_flops

HOW = {"weight": 0.75, "temperature": 2.0}


def written(folder: Path, name: str, flavor: str, seed: int = 1, sharpened: float = 20.0) -> str:
    """A folder in Hugging Face's format with a model's initial weights. sharpened: a factor on its logits."""
    family = load_family(name, flavor)
    model = family.on_meta()
    initialize(model, family, seed, torch.device("cpu"))
    tensors = {}
    for ours, parameter in model.named_parameters():
        value = parameter.detach() * (sharpened if ours == "head.norm.weight" else 1.0)
        their = their_name(family.module, ours)
        assert their is not None
        parts = each_expert(their, value.shape)
        tensors |= {part.name: each.clone() for part, each in zip(parts, value if "{e}" in their else [value], strict=True)}
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(family.module.to_hf(family.config)))
    return str(folder)


def configured(degrees: dict[str, int], teacher: str, flavor: str = "plain", accumulation: int = 1, **keys: Any) -> Config:
    sections = {"training": {"steps": 3}, "distillation": {"teacher": teacher, **HOW}, **keys}
    return config_of(degrees, sections.pop("flavor", flavor), accumulation, **sections)


# ------------------------------------------------------------------------------------------------------------- formulas


def exact(family: Family, weights: dict[str, torch.Tensor]) -> Decoder:
    """A float64 model on one process, without titanlite's changes."""
    with torch.device("meta"):
        model: Decoder = family.module.Model(family.config)
    model.load_state_dict({name: value.double() for name, value in weights.items()}, assign=True)
    return model


def test_loss_and_gradients_are_those_of_a_plain_program_in_float64(pools, tmp_path):
    config = configured(ONE, written(tmp_path / "teacher", "tests.tiny", "deep"))
    found = trajectory_of(pools, ONE, config)
    of_teacher = config_of_teacher(config)
    assert of_teacher is not None
    family = family_of(of_teacher.model)
    theirs = {f"model.{name}": torch.empty(p.shape) for name, p in family.on_meta().named_parameters()}
    load_weights(theirs, find_weights(tmp_path / "teacher", family, family.on_meta()))
    teacher = exact(family, {name.removeprefix("model."): value for name, value in theirs.items()})
    student = exact(load_family("tests.tiny", "plain"), found.weights).requires_grad_()
    tokens = found.batches[0]
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    seq = SeqInfo(torch.arange(inputs.shape[1]).expand_as(inputs))
    assert student.head is not None and teacher.head is not None
    ours, known = student.head(student(inputs, seq)).flatten(0, 1), teacher.head(teacher(inputs, seq)).flatten(0, 1)
    p, q = (known / 2.0).softmax(-1).detach(), (ours / 2.0).softmax(-1)
    divergence = (p * (p.log() - q.log())).sum(-1).mean()
    loss = 0.25 * F.cross_entropy(ours, labels) + 0.75 * 4.0 * divergence
    loss.backward()
    assert divergence > 0.1
    assert found.losses[0] == pytest.approx(loss.item(), rel=2e-6)
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        assert (found.gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_the_head_gives_each_chunk_the_teachers_logits_of_its_own_tokens():
    torch.manual_seed(0)
    head, teacher = (Head(RMSNorm(dim, 1e-5), dim, 72) for dim in (16, 24))
    for each in (*head.parameters(), *teacher.parameters()):
        torch.nn.init.normal_(each, mean=0.5)
    head.sizes, teacher.softcap = Sizes(8 * 7 * 72, 5 * 16), 2.0  # 7 of 28 tokens at a time
    hidden, known = torch.randn(3, 10, 16, requires_grad=True), torch.randn(3, 10, 24)
    labels = torch.randint(72, (3, 10))
    labels[0, 0] = labels[1, 5] = IGNORE
    head.loss = lambda *of_chunk, **by_name: distilled(*of_chunk, **by_name, weight=0.5, temperature=2.0)
    loss = head(hidden, labels, lambda: teacher.outputs(known))
    loss.backward()
    leaf, valid = hidden.detach().requires_grad_(), labels.flatten() != IGNORE
    both = [each.flatten(0, 1)[valid] for each in (head(leaf), teacher(known).detach())]
    expected = distilled(both[0], labels.flatten()[valid], both[1], 0.5, 2.0).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=5e-6, atol=0)
    torch.testing.assert_close(hidden.grad, leaf.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # validation
        of_labels = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(head(hidden, labels), of_labels)


# --------------------------------------------------------------------------------------------------------------- meshes

# The mesh, the teacher, and keys of the student.
CELLS: dict[str, tuple[dict[str, int], tuple[str, str], dict[str, Any]]] = {
    "shard 2 x tp 2": (TWO_BY_TWO, ("tests.tiny", "deep"), {}),
    "cp 2": ({"cp": 2}, ("tests.tiny_gemma3", "two"), {}),
    "ep 2": (SPLIT, ("tests.tiny_qwen3_moe", "plain"), {**MOE, "moe": {"balance_loss": 0.01}}),
    "ep 2, a dense teacher, accumulated": (SPLIT, ("tests.tiny", "tied"), {**MOE, "moe": {}, "accumulation": 2}),
    "tp 4, a vocabulary that it does not divide": ({"tp": 4}, ("tests.tiny", "uneven"), {"flavor": "uneven"}),
    "shard 2, adapters, resharded, compiled": (
        {"dp_shard": 2},
        ("tests.tiny", "deep"),
        {
            "lora": {"enable": True, "rank": 4},
            "parallelism": {"fsdp_reshard_after_forward": "always"},
            "compile": {"enable": True, "backend": "aot_eager"},
        },
    ),
    "shard 2 x tp 2, a loss of the user's own": (
        TWO_BY_TWO,
        ("tests.tiny", "deep"),
        {"training": {"steps": 3, "loss": "tests.own.parts:reverse_divergence"}},
    ),
}


@pytest.mark.parametrize("cell", slow_but(["shard 2 x tp 2", "cp 2", "ep 2"], CELLS))
def test_a_mesh_distills_as_one_process_does(pools, tmp_path, cell):
    degrees, teacher, keys = CELLS[cell]
    folder = written(tmp_path / "teacher", *teacher)
    found, _ = as_one_process(pools, degrees, lambda mesh: configured(mesh, folder, **keys))
    assert not any(name.startswith("teacher") for name in found.weights)


# -------------------------------------------------------------------------------------------------------------- resumes


def test_a_resumed_run_is_the_uninterrupted_one_and_another_teacher_is_refused(pools, tmp_path):
    keys: dict[str, Any] = {"distillation": {"teacher": written(tmp_path / "teacher", "tests.tiny", "deep"), **HOW}}
    found = resumes_once(pools, SHARD, tmp_path, **keys)
    assert sum(name.startswith("model.") for name in found) == len(
        dict(load_family("tests.tiny", "plain").on_meta().named_parameters())
    )
    (start, *_) = json.loads((tmp_path / "parts/provenance.json").read_text())
    assert len(start["teacher"]) == 32
    keys["distillation"]["teacher"] = written(tmp_path / "another", "tests.tiny", "deep", seed=2)
    with pytest.raises(WorkerFailure, match=rf"teacher = '\w+', was '{start['teacher']}'(?s:.*)allow_changes teacher"):
        run(pools, SHARD, tmp_path / "parts", STEPS + 1, **keys)


def test_a_resume_with_other_code_of_the_teachers_family_is_refused_with_its_difference(tmp_path):
    """The student's family is another one."""
    config = configured(ONE, written(tmp_path / "teacher", "tests.tiny", "deep"), model={"name": "tests.tiny_moe"})
    data = learnable_data(config)
    identity = RunIdentity(config, family_of(config.model), data, 8)
    numbers = json.loads(json.dumps(numbers_of(identity, build_schedule(config), Progress(2, data.timeline(8)))))
    assert [*changes(identity, numbers)] == []
    ours = numbers["own_source"]["models.llama3"]
    ours |= {"hash": "0", "text": ours["text"] + "other = 1\n"}
    (change,) = changes(identity, numbers)
    assert change.key == "model.source" and "-other = 1" in change.diff
    numbers["config"]["distillation"]["teacher"], numbers["own_source"] = "elsewhere", {}
    assert [*changes(identity, numbers)] == []  # another teacher, which "teacher" allows, has other modules


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture
def large(tmp_path) -> str:
    return written(tmp_path / "teacher", "tests.tiny", "large")


def faults_of(folder: str, ranks: int = 1, **keys: Any) -> list[str]:
    keys["distillation"] = {"teacher": folder, **keys.get("distillation", {})}
    keys["job"] = {"dump_folder": str(Path(folder).parent / "run")}
    keys["model"] = {"name": "tests.tiny", "flavor": "large", **keys.get("model", {})}
    with pytest.raises(ValueError) as refused:
        check(config_of({}, **keys), "run.toml", ranks, open_files=False)
    return [line.strip() for line in str(refused.value).splitlines() if "." in line][1:]


def test_a_teacher_with_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    (fault,) = faults_of(written(tmp_path / "teacher", "tests.tiny", "deep"))
    assert fault.startswith("distillation.teacher = ") and "512" in fault and "4,096" in fault


def test_a_folder_that_is_missing_or_incomplete_or_no_model_is_refused(tmp_path, large):
    (fault,) = faults_of(str(tmp_path / "nowhere"))
    assert fault.endswith('nowhere": there is no such folder')
    folder = Path(large)
    (folder / "model.safetensors").unlink()
    (fault,) = faults_of(str(folder))
    assert fault.startswith("distillation.teacher = ") and "has neither model.safetensors nor " in fault
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (fault,) = faults_of(str(folder))
    assert fault.startswith("distillation.teacher = ") and "reads model_type 'gpt2'" in fault


def test_a_teacher_that_a_copy_of_its_family_reads_too_is_refused_with_what_decides(large, monkeypatch):
    """As after the tutorial's first command, which copies models/llama3.py."""
    monkeypatch.setattr("titanlite.registry.family.family_names", lambda: ["llama3", "tests.tiny"])
    (fault,) = faults_of(large)
    assert fault.startswith("distillation.teacher = ") and "llama3 and tests.tiny both" in fault and "HF_TYPES" in fault


REFUSED: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "a pipeline": (
        *(2, {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 2}}),
        *("distillation.teacher = ", "parallelism.pipeline_parallel_degree = 2"),
    ),
    "a mesh that the teacher does not fit": (
        *(8, {"parallelism": {"tensor_parallel_degree": 8}, "model": {"overrides": {"n_kv_heads": 8}}}),
        *("distillation.teacher = ", "does not divide n_kv_heads = 4"),
    ),
    "a loss without the teacher's logits": (
        *(1, {"training": {"loss": "tests.own.parts:smoothed"}}),
        *("training.loss = ", "must take logits, labels, teacher_logits"),
    ),
    "a loss without a teacher": (
        *(1, {"training": {"loss": "tests.own.parts:reverse_divergence"}, "distillation": {"teacher": ""}}),
        *("training.loss = ", "takes teacher_logits, so set distillation.teacher"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_teacher_does_not_fit_is_refused(large, case):
    ranks, keys, key, words = REFUSED[case]
    (fault,) = faults_of(large, ranks, **copy.deepcopy(keys))
    assert fault.startswith(key) and words in fault


class HeadWithoutTeacher(Head):
    """Its loss is that of Head, and titanlite calls it with one argument more than it takes."""

    def forward(self, hidden, labels=None):
        return super().forward(hidden, labels)


def test_a_head_whose_logits_or_loss_distillation_would_not_compute_is_refused(large, monkeypatch):
    """A teacher's factor on its logits was left out, without a message; a student without the argument stopped in Python."""
    monkeypatch.setattr(tiny, "Model", with_head(OwnLossHead))
    (fault,) = faults_of(large)
    assert "the head of tests.tiny does not compute its loss by models.head.Head" in fault
    monkeypatch.setattr(tiny, "Model", with_head(HeadWithoutTeacher))
    (fault,) = faults_of(large)
    assert fault.endswith("forward of the head of tests.tiny takes no teacher, as that of models.head.Head does")
    monkeypatch.undo()
    monkeypatch.setattr(llama3, "Model", with_head(ScaledHead, llama3))
    (fault,) = faults_of(large)
    assert fault.endswith("the head of llama3 computes logits by a forward of its own, which a student does not call")


def test_a_dense_teacher_of_a_model_with_split_experts_is_not_refused(tmp_path, large):
    model, job = {"name": "tests.tiny_moe", "flavor": "large"}, {"dump_folder": str(tmp_path / "run")}
    config = config_of(SPLIT, model=model, job=job, distillation={"teacher": large}, training={"global_batch_size": 16})
    assert check(config, "run.toml", 2, open_files=False) == []


def test_another_tokenizer_in_the_teachers_folder_is_refused(tmp_path, large):
    (tmp_path / "assets").mkdir()
    for place, text in ((Path(large), "abc abd"), (tmp_path / "assets", "xyz xyw")):
        train_tokenizer([text * 20]).save(str(place / "tokenizer.json"))
    (fault,) = faults_of(large, model={"hf_assets_path": str(tmp_path / "assets")})
    assert fault.startswith("distillation.teacher = ") and "model.hf_assets_path have different ids for" in fault


# ---------------------------------------------------------------------------------------------------------- predictions


def test_a_prediction_and_the_reported_flops_count_the_teachers_weights_and_its_forward_pass(tmp_path):
    teacher = written(tmp_path / "teacher", "tests.tiny", "deep")
    family, student = load_family("tests.tiny", "deep"), load_family("tests.tiny", "plain")
    plain, config = (configured({"dp_shard": 2}, folder) for folder in ("", teacher))
    without, found = (predict(each, 2, "cpu") for each in (plain, config))
    weights = sum(p.numel() for p in family.on_meta().parameters())
    assert found.memory.masters - without.memory.masters == 4 * weights // 2
    forward = family.module.flops(family.config, config.training.seq_len).palm / 3
    tokens = config.training.local_batch_size * config.training.seq_len
    assert found.work.flops - without.work.flops == pytest.approx(tokens * forward, rel=0.02)
    assert training_flops(student, config).palm - training_flops(student, plain).palm == forward


@pytest.mark.slow
def test_a_prediction_with_a_teacher_knows_what_the_compiler_recomputes(tmp_path):
    """The teacher was built after the student, so that the compiler seemed to keep what a teacher keeps: everything."""
    teacher = written(tmp_path / "teacher", "tests.tiny", "deep")
    kept = []
    for mode in ("none", "full"):
        keys = {"activation_checkpoint": {"mode": mode}, "compile": {"enable": True}}
        kept.append(predict(configured({}, teacher, "deep", **keys), 1, "cpu").memory.activations)
    assert kept[1] < 0.6 * kept[0], kept
