"""On a folder in Hugging Face's format, titanlite eval gives the results of lm-eval's own `hf` model."""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from tests.end_to_end.test_eval import TASKS, write_tasks
from tests.hf_folders import write
from titanlite.ground.errors import UserError
from titanlite.tools.eval import _named_tasks
from titanlite.tools.harness import Harness
from titanlite.tools.open_model import open_model

LENGTH = 32  # the most tokens that the models read at once
# Contexts and answers of unequal lengths, an empty context, one that contains the bos_token as text, one longer than LENGTH.
QUESTIONS = [
    {"context": "one two three", "answers": [" four", " nine"], "right": 0},
    {"context": "six seven ", "answers": ["eight nine ten", "one"], "right": 1},
    {"context": "", "answers": ["one two", "zebra"], "right": 0},
    {"context": "<s>one two", "answers": [" three", " x"], "right": 0},
    {"context": "a few words of text " * 9, "answers": ["one two", "three"], "right": 0},
]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """All results and responses, of titanlite and of lm-eval's `hf` model; runs in a pool of one rank."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}  # before the imports
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    ours = Harness(open_model(folder, torch.device("cpu")), LENGTH, batch_size=3)
    theirs = HFLM(pretrained=str(folder), device="cpu", max_length=LENGTH, batch_size=3)
    found = []
    for model in (ours, theirs):
        manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
        result = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        responses = {name: [sample["filtered_resps"] for sample in samples] for name, samples in result["samples"].items()}
        found.append({"results": result["results"], "responses": responses})
    return json.loads(json.dumps(found))


@pytest.mark.slow  # the imports of lm-eval and its model take half a minute
@pytest.mark.parametrize("begin", ["named", "added"])
def test_every_result_equals_that_of_lm_evals_own_model(pools, tmp_path, begin):
    """begin: the bos_token is only named, or is added before every text by the tokenizer. tests/end_to_end/test_eval.py has
    none.
    """
    folder = write(tmp_path / "model", "tests.tiny", "plain")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    if begin == "added":
        special = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_tasks(folder)
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    [(ours, theirs)] = pools[1].run("tests.unit.hf.test_lm_eval:numbers", folder=folder)
    for question, mine, value in zip(QUESTIONS, *(found["responses"]["written"] for found in (ours, theirs)), strict=True):
        assert mine == value or not question["context"]  # `hf` continues an empty text behind the padding of its batch
    largest = 0.0
    for name in TASKS:
        assert ours["results"][name].keys() == theirs["results"][name].keys()
        for metric, value in theirs["results"][name].items():
            mine = ours["results"][name][metric]
            assert mine == (pytest.approx(value, rel=1e-5) if isinstance(value, float) and not math.isnan(value) else value)
        if name != "written":
            pairs = zip(_flat(ours["responses"][name]), _flat(theirs["responses"][name]), strict=True)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
    print(f"{begin}: log-likelihoods differ by {largest:.1e}")
    assert largest < 1e-3


@pytest.mark.slow  # as above: imports
def test_a_task_whose_new_tokens_leave_no_room_for_a_prompt_is_refused_as_lm_evals_model_refuses_it():
    asked = SimpleNamespace(args=("one two three", {"until": [], "max_gen_toks": LENGTH}))
    with pytest.raises(UserError, match=f"--max-length {LENGTH}: a task asks for {LENGTH} new tokens"):
        Harness(SimpleNamespace(), LENGTH, batch_size=1).generate_until([asked])


@pytest.mark.slow  # as above: imports
def test_a_generation_option_that_titanlite_does_not_have_is_refused():
    options = {"until": [], "max_gen_toks": 4, "num_beams": 1}
    for more in ({"num_beams": 4}, {"repetition_penalty": 1.1}, {"max_length": 40}):
        asked = SimpleNamespace(args=("one", options | more))
        with pytest.raises(UserError, match=f'sets "{next(iter(more))}" in its generation_kwargs; titanlite eval knows until'):
            Harness(SimpleNamespace(), LENGTH, batch_size=1).generate_until([asked])


def samples(folder: Path, assets: Path) -> tuple[list[list[str]], int, frozenset[int]]:
    """Six equal requests with each batch size; the length of a text that may end at a special token; the ids that end texts
    where the tokenizer is that of `assets`. In a pool of one rank.
    """
    loaded = open_model(folder, torch.device("cpu"))
    asked = [SimpleNamespace(args=("one two", {"until": [], "max_gen_toks": 8, "temperature": 1.0}))] * 6
    of_sizes = [Harness(loaded, LENGTH, batch_size=size).generate_until(asked, disable_tqdm=True) for size in (1, 2, 6)]
    loaded = loaded._replace(tokenizer=loaded.tokenizer._replace(end_of_text=loaded.tokenizer.vocabulary, model_folder="none"))
    end, lengths = Tokenizer.from_file(loaded.tokenizer.source).token_to_id("<|endoftext|>"), []
    with torch.no_grad():
        loaded.model.head.output.weight.zero_()
    loaded.model.head.register_forward_hook(lambda *args: lengths.append(1) or args[2].index_fill(-1, torch.tensor([end]), 1.0))
    stopped = SimpleNamespace(args=("one", {"until": ["<|endoftext|>"], "max_gen_toks": 8}))
    Harness(loaded, LENGTH, batch_size=1).generate_until([stopped], disable_tqdm=True)
    return of_sizes, len(lengths), open_model(folder, torch.device("cpu"), assets=str(assets)).tokenizer.ends


@pytest.mark.slow  # as above: imports
def test_equal_requests_are_sampled_independently_and_a_special_token_may_end_a_text(pools, tmp_path):
    """Tasks with repeats have equal requests. Their texts had been the same again in each batch."""
    folder = write(tmp_path / "model", "tests.tiny", "plain")
    (assets := tmp_path / "tokenizer").mkdir()
    shutil.copy(folder / "tokenizer.json", assets)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    [(of_sizes, steps, ends)] = pools[1].run("tests.unit.hf.test_lm_eval:samples", folder=folder, assets=assets)
    assert of_sizes[0] == of_sizes[1] == of_sizes[2] and len(set(of_sizes[0])) == 6
    assert steps == 1 and 7 in ends


@pytest.mark.slow  # as above: imports
def test_patterns_of_tasks_name_those_that_they_match(tmp_path):
    write_tasks(tmp_path)
    options = SimpleNamespace(tasks="writ*,rolling,wr*", include_path=tmp_path / "tasks")
    assert [name for name in _named_tasks(options) if name in TASKS] == ["written", "rolling"]
    with pytest.raises(UserError, match='there is no task "zz\\*"'):
        _named_tasks(SimpleNamespace(tasks="rolling,zz*", include_path=tmp_path / "tasks"))


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for part in value for number in _flat(part)]
    return [float(value)]
