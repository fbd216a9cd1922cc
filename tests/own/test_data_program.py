"""A run with parts of the user's own as a user starts it: a rank is killed and the run continues."""

from pathlib import Path

import pytest

from tests.end_to_end.forked import train
from tests.end_to_end.launcher import run
from tests.end_to_end.test_run_train import reports, working_folder

PARTS = Path(__file__).with_name("parts.py")
# A rank is killed at its 7th state, once per run.
KILLING = """

class Killed(Walks):
    states = 0

    def state_dict(self):
        self.states += 1
        marker = pathlib.Path("killed")
        if self.states == 7 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()
"""
KEYS = (
    *("--training.dataset=my_parts:Killed", "--training.steps=10", "--checkpoint.interval=2"),
    *("--optimizer.name=my_parts:Lion", "--training.loss=my_parts:smoothed", "--lr_scheduler.decay_type=my_parts:inverse_sqrt"),
    *('--metrics.extra=["my_parts:head_entropy"]', '--hooks.modules=["my_parts"]'),
)


@pytest.mark.slow
def test_a_killed_run_continues_and_reports_one_trajectory(tmp_path):
    folder = working_folder(tmp_path)
    (folder / "my_parts.py").write_text("import os, pathlib, signal\n" + PARTS.read_text() + KILLING)
    (folder / "killed").touch()
    whole = train("run.toml", *KEYS, "--job.dump_folder=whole", folder=folder, ranks=2)
    assert whole.code == 0, whole.err
    (folder / "killed").unlink()
    ended = run("run.toml", *KEYS, folder=folder, NGPU="2", MAX_RESTARTS="1")
    assert ended.code == 0 and "was ended by SIGKILL" in ended.err, ended.err
    assert (folder / "killed").exists()
    whole, parts = ([(each["step"], each["loss"]) for each in reports(folder / name)] for name in ("whole", "out"))
    assert parts == whole and len(whole) == 10
