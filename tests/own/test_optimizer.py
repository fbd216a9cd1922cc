"""An optimizer of the user's own: what is refused before any process starts. distributed/ has runs with one."""

import inspect

import pytest
import torch

from tests.distributed.scenarios import config_of
from tests.own.parts import Lion
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.optim import build
from titanlite.optim.own import build_own, is_own
from titanlite.optim.state import checkpoint_bytes
from titanlite.plan.predict import predict
from titanlite.registry.check import found_by
from titanlite.registry.family import family_of
from titanlite.tools.check import check_here
from titanlite.tools.verify import own_parts
from titanlite.transforms.meta import on_meta

HEAD = """import torch
class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0, power: float = 1.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
"""
MOVE = "                p.sub_(p.grad, alpha=group['lr'])\n"


def state(value: str) -> str:
    return HEAD + MOVE + f"                self.state[p]['kept'] = {value}\n"


def listed(value: str) -> str:
    """A class that keeps moments outside of its state."""
    every = "        every = [p for group in self.param_groups for p in group['params']]\n"
    start, step = HEAD.split("    @torch")
    add = "                for kept in self.kept if type(self.kept) is list else self.kept['m'].values():\n"
    add += "                    if kept.shape == p.shape: kept.add_(p.grad)\n"
    return f"{start}{every}        self.kept = {value}\n    @torch{step}{MOVE}{add}"


# The module, the options, and the message besides the class with its file and line.
WRONG = {
    "raises in its step": (HEAD + "                raise OSError('no')\n", {}, "fails (MODULE, line 9): OSError('no')"),
    "NaN": (HEAD + "                p.div_(p.grad)\n", {}, "gives NaN or infinity for zero gradients"),
    "state of another shape": (state("torch.zeros(7)"), {}, "has local shape (7,); must be 0-d"),
    "a number as state": (state("3"), {}, "is 3; checkpoints hold tensors: make it one, such as torch.zeros(())"),
    "a count of its own": (HEAD + MOVE + "        self.lr_now = len(self.state) + 1\n", {}, "changes self.lr_now in its step"),
    "a count in its groups": (HEAD + MOVE + "            group['k'] = 1\n", {}, 'changes group["k"] in its step'),
    "moments in a list": (listed("[torch.zeros_like(p) for p in every]"), {}, "changes self.kept in its step"),
    "moments in a dict": (listed("{'m': {p: p * 0 for p in every}}"), {}, "changes self.kept in its step"),
    "moments in a group": (HEAD + MOVE + "            group['kept'] = [p * 1]\n", {}, 'changes group["kept"] in its step'),
    "state of no parameter": (HEAD + MOVE + "        self.state['all'] = {}\n", {}, "which is no parameter"),
    "another rate": (HEAD + MOVE.replace("group['lr']", "0.1"), {}, 'changes parameters with group["lr"] = 0'),
    "no decay": (HEAD.replace(", weight_decay=weight_decay", "") + MOVE, {}, "has no weight_decay among its defaults"),
    "a closure": (HEAD.replace("closure=None", "closure") + MOVE, {}, "its step needs a closure"),
    "no optimizer": ("class Mine:\n    pass\n", {}, "must be a class derived from torch.optim.Optimizer"),
    "a key as an option": (HEAD + MOVE, {"lr": 0.1}, "optimizer.options.lr: set optimizer.lr instead"),
}


def configured(name: str, **keys) -> Config:
    return config_of({}, optimizer={"name": name, **keys})


def faults_of(config: Config) -> list[str]:
    return list(found_by(build.model_faults, config.optimizer, on_meta(family_of(config.model), config)))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_optimizer_is_one_message_with_its_class_and_line(case, own_module):
    text, options, said = WRONG[case]
    file = own_module(text)
    (fault,) = faults_of(configured("own_code:Mine", options=options))
    assert said.replace("MODULE", str(file)) in fault
    named = fault.startswith('optimizer.name = "own_code:Mine"') and f"({file}, line " in fault
    assert named or fault.startswith("optimizer.options")


@pytest.mark.parametrize(("name", "said"), [("Mine", "is 3; checkpoints hold tensors"), ("Other", "has no Other")])
def test_a_start_names_a_wrong_optimizer_once(name, said, own_module, tmp_path):
    """What disk and memory must hold follows from its state, which ended each start with an AttributeError."""
    own_module(state("3"))
    keys = {"optimizer.name": f"own_code:{name}", "checkpoint.enable": True, "job.dump_folder": str(tmp_path)}
    with pytest.raises(UserError) as raised:
        check_here(Config().with_keys(keys), "run.toml", 1, 1)
    assert "run.toml: 1 fault" in str(raised.value) and said in str(raised.value)


def test_state_that_appears_after_the_first_step_is_refused_since_a_resume_could_not_read_it(own_module):
    late = "                if 'half' in self.state[p]: self.state[p]['late'] = p * 1\n"
    own_module(state("p * 2") + late)
    groups = [{"params": [("weight", torch.nn.Parameter(torch.ones(3)))], "weight_decay": 0.0}]
    optimizer = build_own(groups, configured("own_code:Mine").optimizer)
    for _ in range(2):
        optimizer.step()
    optimizer.state[groups[0]["params"][0][1]]["half"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"^optimizer\.name = .*makes or removes state\['late'\] after its first step"):
        optimizer.step()


@pytest.mark.parametrize("value", ["every", "[p.detach() for p in every]", "[self.state[p]['kept'] for p in every]"])
def test_lists_of_parameters_and_of_state_are_not_taken_for_state_elsewhere(value, own_module):
    made = f"for p in every: self.state[p]['kept'] = torch.zeros_like(p)\n        self.kept = {value}"
    text = listed(value).replace(f"self.kept = {value}", made)
    own_module(text.replace("kept.add_(p.grad)", "self.state[p]['kept'].add_(1)"))
    assert faults_of(configured("own_code:Mine")) == []


_LATER = """                self.state[p].setdefault('kept', torch.zeros_like(p)).add_(p.grad)
        self.kept = [each['kept'] for each in self.state.values()]
"""


@pytest.mark.parametrize(
    "step",
    [
        "                p.data = p.data - group['lr'] * p.grad\n",
        f"{MOVE}{_LATER}",
        f"{MOVE}            group['gradients'] = [p.grad for p in group['params']]\n",
    ],
    ids=["new memory of parameters", "state of the first step", "gradients"],
)
def test_lists_that_a_step_makes_of_parameters_state_and_gradients_are_not_taken_for_state_elsewhere(step, own_module):
    own_module(HEAD + step)
    assert faults_of(configured("own_code:Mine")) == []


OF_TORCH = {"SGD": {"momentum": 0.9, "nesterov": True}, "RAdam": {}, "NAdam": {"betas": [0.9, 0.99]}}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_class_of_pytorch_that_the_guide_names_is_not_refused(name):
    assert faults_of(configured(f"torch.optim:{name}", options=OF_TORCH[name])) == []


def test_decays_of_groups_need_a_class_that_takes_them():
    groups = [{"pattern": "layers.*", "weight_decay": 0.1}]
    for weight_decay, entries, count in ((0.0, [], 0), (0.0, groups, 1), (0.1, [], 1)):
        config = configured("torch.optim:Rprop", weight_decay=weight_decay, groups=entries)
        found = [fault for fault in faults_of(config) if "weight_decay" in fault]
        assert len(found) == count


@pytest.mark.parametrize(
    "training", [{"dtype": "bfloat16"}, {"mixed_precision_param": "float16"}, {"on_nonfinite": "skip"}], ids=str
)
def test_features_that_an_own_optimizer_cannot_support_are_refused(training):
    name = "tests.own.parts:Lion"
    found = [fault for fault in build.faults(config_of({}, optimizer={"name": name}, training=training)) if name in fault]
    assert len(found) == 1 and next(iter(training)) in found[0]


def test_estimate_and_disk_check_count_the_state_of_the_class():
    config = configured("tests.own.parts:Lion")
    model = on_meta(family_of(config.model), config)
    values = sum(p.numel() for p in model.parameters())
    assert is_own(config.optimizer) and faults_of(config) == []
    assert checkpoint_bytes(model, config.optimizer) == 8 * values
    assert predict(config, 1).memory.moments == 4 * values


def test_verify_names_the_file_and_line_of_the_class_if_meshes_differ():
    (line,) = own_parts(configured("tests.own.parts:Lion"))
    assert line.startswith('optimizer.name = "tests.own.parts:Lion" (')
    assert f"parts.py, line {inspect.getsourcelines(Lion)[1]})" in line
    assert own_parts(config_of({})) == []


def test_the_class_gets_rate_and_decay_of_each_group(group_of_one):
    config = configured(
        "tests.own.parts:Lion", weight_decay=0.3, groups=[{"pattern": "embed.*", "lr": 0.5, "weight_decay": 0.0}]
    )
    optimizer = build.build_optimizer(family_of(config.model).on_meta().to_empty(device="cpu"), config.optimizer)
    build.set_lr(optimizer, 0.01)
    found = {name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]}
    assert found["embed.weight"] == (0.005, 0.0) and found["layers.0.attention.wq.weight"] == (0.01, 0.3)
