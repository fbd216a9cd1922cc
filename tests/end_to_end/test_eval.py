"""titanlite eval: on a task of local text, lm-eval gets the answers of transformers' model with the exported weights."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.forked import prepare, titanlite, train
from tests.repetitions import campaign_but

# Contexts and answers of unequal lengths, an empty context, and one longer than the model's maximum length.
QUESTIONS = [
    {"context": "one two three", "answers": [" four", " nine"], "right": 0},
    {"context": "six seven", "answers": [" eight nine ten", " one"], "right": 0},
    {"context": "", "answers": ["one two", "zebra"], "right": 0},
    {"context": "one two three four five six seven eight nine ten " * 5, "answers": ["one two", "three"], "right": 0},
]
EXPORT = "out/checkpoint/step-00000010-hf"
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}!",
                "metric_list": [{"metric": "bits_per_byte"}]},
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{answers[right]}}",
        "generation_kwargs": {"until": ["ten"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    """The tasks, in `tasks`, and their text."""
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "tasks").mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    for name, task in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **data, "test_split": "test", **task}))


def expected(folder: Path) -> tuple[list[list[float]], list[float], list[str]]:
    """By transformers: the log-probability of each answer and of each whole text, and the continuations.

    folder: in Hugging Face's format.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def log_probability(context: list[int], new: list[int]) -> float:
        shown = (context + new)[-33:]  # the model reads 32 tokens and predicts the next one
        found = model(torch.tensor([shown[:-1]])).logits[0].log_softmax(-1)
        return sum(found[place - 1, shown[place]].item() for place in range(len(shown) - len(new), len(shown)))

    answers, texts, written = [], [], []
    for question in QUESTIONS:
        stripped = question["context"].rstrip()
        context = tokenizer(stripped).input_ids
        whole = [tokenizer(question["context"] + answer).input_ids for answer in question["answers"]]
        answers.append([log_probability(context or [start], ids[len(context) :]) for ids in whole])
        ids = tokenizer(question["context"] + "!").input_ids
        windows = [ids[first : first + 32] for first in range(0, len(ids), 32)]
        # each window after the first is predicted after as much of the text as fits
        texts.append(
            sum(
                log_probability([start, *ids][max(0, 32 * number + len(part) - 32) : 32 * number + 1], part)
                for number, part in enumerate(windows)
            )
        )
        prompt = (tokenizer(question["context"]).input_ids or [start])[-20:]
        new = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=end)[0, len(prompt) :]
        written.append(tokenizer.decode(new).partition("ten")[0].removesuffix(tokenizer.eos_token))
    return answers, texts, written


@pytest.mark.parametrize("ranks", campaign_but((), ["1"], ["1", "2"]))
def test_log_likelihoods_and_texts_are_those_of_transformers_model_of_the_export(tmp_path, ranks):
    prepare(tmp_path, "tests.tiny_qwen3", checkpoint={"enable": True, "interval": 10, "last_save_in_hf": True})
    ended = train("run.toml", folder=tmp_path)
    assert ended.code == 0, ended.err
    write_tasks(tmp_path)
    words = ["--checkpoint", "out", "--tasks", "choice,rolling,written", "--include-path", "tasks", "--output", "found.json"]
    words += ["--batch-size", "3", "--tp", ranks, "--model", "tests.tiny_qwen3"]
    ended = titanlite("eval", *words, folder=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    assert ended.code == 0, ended.err
    assert "|choice" in ended.out and "|written" in ended.out
    assert re.search(r"\|\s*Tasks\s*\|\s*Version\s*\|", ended.out), ended.out
    output = json.loads((tmp_path / "found.json").read_text())
    found, options = output["samples"], output["titanlite"]
    assert (options["source"], options["max_length"]) == ("out/checkpoint/step-00000010", 32)
    assert output["n-samples"]["choice"] == {"original": 4, "effective": 4}
    cut = re.findall(r"(\d) of (\d) requests were cut on the left to fit 32 tokens; a higher --max-length", ended.err)
    assert sorted(cut) == [("1", "4"), ("2", "8")], ended.err  # of "written" and of "choice"
    answers, texts, written = expected(tmp_path / EXPORT)
    for sample, wanted in zip(found["choice"], answers, strict=True):
        assert [value for value, _ in sample["filtered_resps"]] == pytest.approx(wanted, abs=1e-3)
    for sample, wanted in zip(found["rolling"], texts, strict=True):
        assert sample["filtered_resps"][0] == pytest.approx(wanted, abs=1e-3)
    assert [sample["filtered_resps"][0] for sample in found["written"]] == written
    assert any(written)
