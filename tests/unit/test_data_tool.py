"""titanlite data show and stats: the data of a step, and the contents of each source."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.mixture import open_data
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.sources import open_tokenizer
from titanlite.data.timeline import Timeline, stored
from titanlite.ground.errors import UserError
from titanlite.loop.resume import Progress, RunIdentity, numbers_of
from titanlite.optim.lr_schedule import build_schedule
from titanlite.registry.family import family_of, vocabulary_of
from titanlite.tools import data as tool
from titanlite.tools.options import config_parser

TEXTS = {f"doc{number}.txt": f"document {number}: " + f"word{number} " * (5 + 7 * number) for number in range(8)}


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A configuration of one source of eight text files, with its own tokenizer and cache."""
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "assets").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).write_text(text)
    train_tokenizer(TEXTS.values()).save(str(tmp_path / "assets" / "tokenizer.json"))
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "tests.tiny"\nflavor = "plain"\nhf_assets_path = "assets"\n[training]\ndataset_path = "text"\n'
        "seq_len = 16\nsteps = 5\nlocal_batch_size = 2\nglobal_batch_size = 4\n[lr_scheduler]\nwarmup_steps = 1\n"
    )
    return tmp_path / "run.toml"


@pytest.fixture
def run(config, capsys, monkeypatch) -> Callable[..., str]:
    """What `titanlite data COMMAND run.toml` prints."""

    def run(command: str, *words: str) -> str:
        monkeypatch.setattr("sys.argv", ["titanlite data", command, str(config), *words])
        tool.main()
        return capsys.readouterr().out

    return run


def shown_samples(text: str) -> list[str]:
    """The text of each sample, joined from its documents."""
    samples = text.split("=== sample ")[1:]
    return ["".join(part.split("\n", 1)[1].rstrip("\n") for part in sample.split("--- document ")[1:]) for sample in samples]


def read_samples(config: Path, options: list[str], step: int, timeline: Timeline | None = None) -> list[str]:
    """The text of each sample, as a run reads it."""
    keys = read_config(config, options)
    data, tokenizer = open_data(keys, vocabulary_of(keys.model)), open_tokenizer("assets").tokenizer
    batch = next(Batches(StepDataset(keys, data, (0, 1), timeline, step)))
    tokens = batch.tokens.flatten(0, 1)
    counted = torch.ones_like(tokens, dtype=torch.bool) if batch.counted is None else batch.counted.flatten(0, 1)
    return [tokenizer.decode(row[used].tolist(), skip_special_tokens=False) for row, used in zip(tokens, counted, strict=True)]


@pytest.mark.parametrize(("policy", "step"), [("pack", 1), ("best_fit", 3), ("truncate", 3)])
def test_show_prints_the_text_that_the_step_reads(config, run, policy, step):
    option = ["--training.document_policy", policy]
    assert shown_samples(run("show", "--step", str(step), *option)) == read_samples(config, option, step)


def test_show_names_sample_document_and_the_file_that_it_came_from(run):
    text = run("show", "--step", "2", "--training.document_policy", "truncate")
    heads = [line for line in text.splitlines() if line.startswith(("===", "---"))]
    assert [head.split()[2] for head in heads[::2]] == ["4", "5", "6", "7"]
    for document, body in zip(heads[1::2], shown_samples(text), strict=True):
        number = int(document.split()[2])
        assert f"{number} of " in document and f"doc{number}.txt, tokens 0 to 16 of " in document
        assert body.startswith(f"document {number}: ")


def test_stats_counts_tokens_documents_lengths_epochs_and_waste(run):
    text = run("stats")
    tokenizer = open_tokenizer("assets").tokenizer
    lengths = [len(tokenizer.encode(TEXTS[name])) + 1 for name in sorted(TEXTS)]
    samples = (sum(lengths) - 1) // 16
    assert f"tokens      {sum(lengths):,} in 1 files" in text
    assert "documents   8, " in text
    assert f"samples     {samples} an epoch" in text
    assert f"epochs      {20 / samples:.3f}" in text
    assert f"0.00% of the positions are padding, {1 - samples * 16 / sum(lengths):.2%} of the tokens" in text
    bars = [line.split() for line in text.splitlines() if " to " in line and line.rstrip().endswith(("#", "0"))]
    counted = {int(low): int(count) for low, _, _, count, *_ in bars}
    assert counted == {low: sum(low <= length < 2 * low for length in lengths) for low in counted}
    assert sum(counted.values()) == 8


@pytest.fixture
def changed(config, tmp_path) -> dict[int, tuple[list[str], Timeline]]:
    """step -> options, timeline, of a run that read 16 samples 1 : 1, then 3 : 1; it saved steps 2, 4 and 6."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "doc.txt").write_text("another source: " + "words " * 200)
    saves, common = tmp_path / "run" / "checkpoint", ["--job.dump_folder", "run", "--checkpoint.enable", "true"]
    common += ["--training.steps", "9", "--training.dataset_path", ""]
    steps: dict[int, tuple[list[str], Timeline]] = {}
    numbers = None
    for weight, last in ((1, 4), (3, 6)):
        sources = f'[{{ path = "text", weight = {weight} }}, {{ path = "more", weight = 1 }}]'
        options = [*common, "--training.sources", sources]
        keys = read_config(config, options)
        data, family = open_data(keys, vocabulary_of(keys.model)), family_of(keys.model)
        timeline = stored(numbers, "").resumed(len(steps), 4, data.mixture) if numbers else data.timeline(4)
        for step in range(len(steps) + 1, last + 1):
            steps[step] = options, timeline
            run = RunIdentity(keys, family, data, 4)
            numbers = json.loads(json.dumps(numbers_of(run, build_schedule(keys), Progress(step, timeline))))
            if step % 2 == 0:
                (saves / f"step-{step:08d}").mkdir(parents=True)
                manifest.write(saves / f"step-{step:08d}", Manifest(numbers, {}))
    return steps | {8: (options, timeline)}


@pytest.mark.parametrize("step", [4, 5, 8])
def test_show_prints_past_and_future_samples_of_a_run_whose_weights_changed(config, run, changed, step):
    options, timeline = changed[step]
    found = shown_samples(run("show", "--step", str(step), *options))
    assert found == read_samples(config, options, step, timeline)
    assert step <= 4 or found != read_samples(config, options, step)


def test_show_finds_every_step_of_a_run_in_its_last_checkpoint_and_refuses_other_sources(config, capsys, run, changed):
    first, later = (["show", "--step", step, *changed[int(step)][0]] for step in ("3", "5"))
    before = run(*first)
    for number in (2, 4):
        shutil.rmtree(config.parent / f"run/checkpoint/step-{number:08d}")
    assert run(*first) == before
    found = refusal(capsys, run, "show", "--step", "5", *first[3:])
    assert "step 5: the run in run did this step with other sources" in found
    assert "4 sequences of text 75.00%, more 25.00%; set these" in found
    assert run(*later)


def test_show_refuses_values_with_which_the_run_had_other_samples(capsys, run, changed):
    other = {"training.seed": "1", "training.seq_len": "8", "training.document_policy": "best_fit"}
    for key, value in other.items():
        found = refusal(capsys, run, "show", "--step", "3", *changed[3][0], f"--{key}", value)
        assert f"step-00000004 says, with {key} = " in found


def test_show_refuses_the_batch_of_other_ranks_where_a_run_has_no_checkpoints(capsys, run, tmp_path):
    """Of the docs' own command: its --ranks is 1, and a run's config.toml has the batch of a rank."""
    (tmp_path / "run").mkdir()
    start = {"time": "2026-11-28T12:00:00", "command": ["titanlite"], "global_batch": 16}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps([start]))
    words = ("show", "--step", "3", "--job.dump_folder", "run")
    assert "the run in run has a global batch of 16 sequences, and this" in refusal(capsys, run, *words)
    assert run(*words, "--training.global_batch_size", "16")


def test_show_refuses_what_a_run_did_otherwise_after_its_last_checkpoint(config, capsys, run, changed, tmp_path):
    """It saved step 6 and did step 7 with a batch of 4; later steps are shown as this configuration will read them."""
    data = open_data(read_config(str(config), changed[6][0]), vocabulary_of(read_config(str(config), changed[6][0]).model))
    start = {"time": "2026-11-28T12:00:00", "command": ["titanlite"], "global_batch": 4, "data": data.describe()}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps([start]))
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": 1.0}) + "\n")
    words = ("show", *changed[8][0], "--metrics.log_freq", "1")
    for more, expected in (({"compared": {"training.seed": 1}}, "training.seed = 1, here 0"), ({}, "another tokenizer")):
        described = start["data"] if more else {**start["data"], "tokenizer": "another"}  # files of Megatron do not say it
        (tmp_path / "run" / "provenance.json").write_text(json.dumps([{**start, **more, "data": described}]))
        assert expected in refusal(capsys, run, *words, "--step", "7")
    (tmp_path / "run" / "provenance.json").write_text(json.dumps([start]))
    assert "has a global batch of 4" in refusal(capsys, run, *words, "--step", "8", "--training.global_batch_size", "8")
    first = ("show", *changed[2][0], "--metrics.log_freq", "1")
    assert "step 7: the run in run reads other sources or weights since its latest start: text 75.00%, more" in refusal(
        capsys, run, *first, "--step", "7"
    )
    assert run(*words, "--step", "7") and run(*first, "--step", "9")


def test_files_are_verified_without_the_ranks_of_a_mesh(run):
    """Those of many recipes were refused: their degrees do not divide one rank."""
    assert ": sound" in run(
        "verify", "--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "2"
    )
    experts = ("--model.name", "tests.tiny_moe", "--parallelism.expert_parallel_degree", "4")
    for mesh in ((), ("--parallelism.tensor_parallel_degree", "2"), ("--parallelism.pipeline_parallel_degree", "2")):
        assert ": sound" in run("verify", *experts, *mesh, "--training.global_batch_size", "16")


def test_show_continues_where_a_rollback_continued(run, changed, tmp_path):
    entry = {"kind": "rollback", "step": 7, "samples": [24, 28], "action": "rollback", "superseded": False}
    entry |= {"found_at": 7, "to_step": 6, "next_sample": 28}
    (tmp_path / "run" / "incidents.jsonl").write_text(json.dumps(entry) + "\n")
    options, _ = changed[8]
    before = run("show", "--step", "7", *options)
    (tmp_path / "run" / "incidents.jsonl").unlink()
    assert shown_samples(before) == shown_samples(run("show", "--step", "8", *options))


def test_show_after_a_rollback_to_the_checkpoint_with_which_the_mixture_changed(config, run, changed, tmp_path):
    shutil.rmtree(tmp_path / "run/checkpoint/step-00000006")
    entry = {"kind": "rollback", "step": 5, "samples": [16, 20], "action": "rollback", "superseded": False}
    entry |= {"found_at": 5, "to_step": 4, "next_sample": 20}
    (tmp_path / "run/incidents.jsonl").write_text(json.dumps(entry) + "\n")
    options, timeline = changed[6]
    shown = shown_samples(run("show", "--step", "5", *options))
    assert shown == read_samples(config, options, 5, timeline.rolled_back(4, 20))


def test_stats_counts_what_a_run_whose_weights_changed_reads_of_each_source(run, changed):
    text = run("stats", *changed[6][0])
    # 16 samples 1 : 1, then 20 samples 3 : 1, with the first source's share rounded down
    assert re.findall(r"in the run  (\d+) samples", text) == [str(8 + 14), str(8 + 6)]


def refusal(capsys, run, *words: str) -> str:
    with pytest.raises((UserError, SystemExit)) as refused:
        run(*words)
    return f"{refused.value} {capsys.readouterr().err}"


def test_the_ranks_of_a_mesh_show_parts_of_the_same_batch(run):
    whole = shown_samples(run("show", "--step", "2"))
    mesh = ["--ranks", "4", "--parallelism.tensor_parallel_degree", "2"]
    of_rank = [shown_samples(run("show", "--step", "2", "--rank", str(rank), *mesh)) for rank in range(4)]
    assert of_rank[0] == of_rank[1] == whole[:2]  # a tensor-parallel group reads the same
    assert of_rank[2] == of_rank[3] == whole[2:]
    assert shown_samples(run("show", "--step", "2", *mesh)) == whole


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_no_damaged_byte_passes_and_the_first_fault_of_each_file_is_listed(config, capsys, run, command):
    """Also bytes that do not affect `stats`: training would refuse them."""
    run(command)
    [folder] = (each for each in (config.parent / "cache").glob("tokens-*") if each.is_dir())
    for name in ("00000.bin", "00000.idx", "00000.bin.sums", "00000.idx.sums"):
        sound = (folder / name).read_bytes()
        for place in {0, len(sound) // 3, len(sound) // 2, len(sound) - 1}:
            content = bytearray(sound)
            content[place] ^= 1
            (folder / name).write_bytes(content)
            found = refusal(capsys, run, command)
            assert f"{folder / name.removesuffix('.sums')}" in found, (name, place)
            if name == "00000.bin":
                assert "1 of 1 token files are damaged:" in found and "is damaged: block 0" in found
        (folder / name).write_bytes(sound)


def test_options_of_data_that_an_option_replaces_have_no_effect(config, run):
    """`check` says that they have none; the ranks once refused them."""
    before = run("show", "--step", "2")
    given = 'dataset = "tests.own.parts:Sums"\ndataset_options = { count = 5 }\n'
    config.write_text(config.read_text().replace('dataset_path = "text"\n', given))
    assert run("show", "--step", "2", "--training.dataset_path", "text") == before
    keys = read_config(config, ["--training.dataset_path", "text"])
    assert open_data(keys, vocabulary_of(keys.model)).sources[0].name == "text"


def test_the_folder_of_a_runs_own_configuration_is_that_of_the_run_from_any_folder(config, monkeypatch):
    folder = config.parent / "moved"
    folder.mkdir()
    (folder / "config.toml").write_text(config.read_text())
    monkeypatch.setattr(tool, "check", lambda *_, **__: None)
    parser = config_parser("data show", None)
    for names, expected in (([], Config().job.dump_folder), (["provenance.json"], str(folder))):
        for name in names:
            (folder / name).write_text("[]")
        assert tool._open(parser, [str(folder / "config.toml")])[1].job.dump_folder == expected
    assert tool._open(parser, [str(folder / "config.toml"), "--job.dump_folder", "x"])[1].job.dump_folder == "x"
