"""Small versions of tests/campaigns: kills, damaged files, other numbers of ranks, two hosts and the cable between them."""

import pytest

from tests.campaigns import NOT_RUN, Mesh, Report, damage, elastic, kill, processors, two_hosts
from tests.campaigns import __main__ as campaigns
from tests.repetitions import campaign_but

# a minute or two each on an idle machine
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.slow
def test_killed_runs_lose_nothing_and_end_like_uninterrupted_ones(tmp_path):
    report = kill.campaign(tmp_path, kill.Kind(Mesh(stages=2)), kills=3, seed=0, at_once=2)
    assert report.broken == []
    assert report.figures["kills"] >= 2  # on a busy machine the run may end before the last one


@pytest.mark.slow
def test_damaged_files_are_named_or_change_nothing(tmp_path):
    assert damage.campaign(tmp_path, cases=3, seed=0, mesh=Mesh(stages=2)).broken == []


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_ranks_and_stages(tmp_path):
    assert elastic.campaign(tmp_path, [Mesh(3), Mesh(stages=2)], steps=3).broken == []


@pytest.mark.slow
def test_two_hosts_train_as_one_and_survive_a_cut_cable(tmp_path):
    if reason := two_hosts.obstacle():
        pytest.skip(reason)
    assert two_hosts.campaign(tmp_path, ["plain", "cut"]).broken == []


# All variants except those that equal the plain run on CI's processor, which has AVX-512 and takes one thread, and further
# orders. A run combines as many as possible; `make campaign PART=processors` prints which one changed a verdict.
_TOGETHER = {
    "an old processor, another user": (
        *("ATEN_CPU_CAPABILITY=default", "MKL_CBWR=COMPATIBILITY", "ONEDNN_MAX_CPU_ISA=SSE41"),
        *("4 threads", "weights disturbed by 1e-7", "TZ=Pacific/Chatham", "an ordinary user", "a Turkish locale"),
    ),
    "an AVX2 processor with too few cores": (
        *("ATEN_CPU_CAPABILITY=avx2", "MKL_CBWR=AVX2", "ONEDNN_MAX_CPU_ISA=AVX2"),
        *("2 threads", "random order, seed 1", "a deep path", "LC_ALL=C", "full load", "pauses"),
    ),
}


@pytest.mark.parametrize("variants", campaign_but((), ["an old processor, another user"], _TOGETHER))
def test_a_sample_of_the_tests_has_the_same_verdicts_on_other_processors(tmp_path, variants):
    report = processors.play(tmp_path, processors.together(_TOGETHER[variants]), processors.SAMPLE)
    assert report.broken == [] and set(report.figures) == {"tests"}, report


def test_a_continued_campaign_still_fails_for_what_it_has_found_and_an_item_that_was_not_run_is_not_good(
    tmp_path, monkeypatch, capsys
):
    results = {"a": Report({}, ["lost"]), "b": Report({}, []), "c": Report({}, [], NOT_RUN)}
    monkeypatch.setattr(campaigns, "RESULTS", tmp_path)
    monkeypatch.setattr(campaigns, "ROOT", tmp_path)
    monkeypatch.setattr(campaigns, "commit", lambda: "this one")
    monkeypatch.setattr(campaigns, "PARTS", {"kills": lambda: {name: lambda _, name=name: results[name] for name in results}})
    for words, code in ([["--only", "b"], 0], [["--only", "c"], 0], [["--only", "a"], 1], [[], 1], [["--only", "d"], 1]):
        monkeypatch.setattr("sys.argv", ["campaigns", "kills", *words])
        with pytest.raises(SystemExit) as ended:
            campaigns.main()
        assert ended.value.code == code
    assert "| c | not run |" in (tmp_path / "kills.md").read_text() and "| a | lost |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["campaigns", "kills", "--again", "--only", "c"])
    with pytest.raises(SystemExit) as ended:  # nothing was run
        campaigns.main()
    assert ended.value.code == 1


@pytest.mark.slow
def test_a_test_whose_verdict_differs_under_a_variant_is_named(tmp_path, monkeypatch):
    """Whether the campaign can fail: a tree with one test that passes only in UTC."""
    (tmp_path / "tests").symlink_to(processors.ROOT / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_zone.py").write_text("import time\n\ndef test_zone():\n    assert time.timezone == 0\n")
    monkeypatch.setattr(processors, "ROOT", tmp_path)
    found = processors.play(tmp_path / "runs", processors.Variant({"TZ": "Pacific/Chatham"}), ["test_zone.py"])
    assert found.broken == ["test_zone.py::test_zone fails, plainly: passed"]
