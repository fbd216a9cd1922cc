"""`titanlite` itself: its help, and a command that does not exist."""

import sys

import pytest

from titanlite.__main__ import COMMANDS, main


@pytest.fixture
def run(monkeypatch, capsys):
    """(*words) -> (exit code, output, errors) of titanlite in this process."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["titanlite", *words])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help_lists_every_command(run, words):
    code, out, err = run(*words)
    assert code == 0 and err == ""
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_an_unknown_command_is_named_with_the_nearest_one(run):
    code, out, err = run("chek", "run.toml")
    assert code == 2 and out == ""
    assert err.startswith("titanlite chek: no such command; did you mean check?\n")


def test_an_unknown_command_that_is_near_to_nothing_lists_them_all(run):
    code, _, err = run("xyz")
    assert code == 2
    assert err.startswith("titanlite xyz: no such command\n") and "\n  estimate " in err
