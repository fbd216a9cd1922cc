"""Rendezvous addresses and gloo's interfaces: unreachable ones are refused before anything waits for them."""

import contextlib
import os
import socket
import threading

import pytest

from tests.end_to_end.launcher import free_port
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.launch import addresses, layout, process


@pytest.fixture
def resolver(monkeypatch):
    """Makes the hostname resolve to these addresses; this node has all of them except those in 203.0.113.0/24."""

    def pretend(*known: str) -> None:
        def look_up(name: str, *_, **__) -> list[tuple]:
            if not known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(addresses, "_can_bind", lambda address: not address.startswith("203.0.113."))
        monkeypatch.setattr(socket, "gethostname", lambda: "node7")
        monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.delenv("RDZV_ENDPOINT", raising=False)

    return pretend


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (["127.0.1.1", "10.0.0.7"], "node7 resolves to 127.0.1.1"),
        (["::1"], "node7 resolves to ::1"),
        ([], "no address of this node"),
        (["203.0.113.5", "10.0.0.7", "127.0.1.1"], ""),
        (["fe80::1%eth0"], ""),
    ],
)
def test_the_first_address_that_can_be_bound_must_not_be_a_loopback(resolver, known, said):
    resolver(*known)
    fault = addresses.hostname_fault()
    assert said in fault and bool(fault) == bool(said)
    assert not fault or all(word in fault for word in ("GLOO_SOCKET_IFNAME", "eth0, ib0"))


def test_only_runs_on_several_nodes_are_refused_and_before_the_process_group(resolver, monkeypatch):
    def joined(*_, **__) -> None:
        raise InterruptedError("joined the store")

    resolver("127.0.1.1")
    monkeypatch.setattr(addresses, "join", joined)
    monkeypatch.setattr(addresses, "set_up_gloo", str)  # it needs the real resolver
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"hostname node7 resolves to 127\.0\.1\.1"):
        process.start(Config(), {})
    # launchers that meet at a loopback address are all on this node
    for name, value in (("RDZV_ENDPOINT", "localhost:29500"), ("LOCAL_WORLD_SIZE", "4")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(InterruptedError, match="joined the store"):
                process.start(Config(), {})


# ------------------------------------------------------------------------------------------------------ variables of a rank


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Sets variables of ranks, and removes all others; without a limit of a container."""
    monkeypatch.setattr(layout, "_CONTROL_GROUP", tmp_path)

    def only(**variables: str) -> None:
        for name in filter(layout._LEFT.fullmatch, list(os.environ)):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return only


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2, .*contradict each other"),
        ({"LOCAL_WORLD_SIZE": "4"}, "WORLD_SIZE=1, .*LOCAL_WORLD_SIZE=4: contradict each other"),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, "RANK=0, WORLD_SIZE=8, LOCAL_RANK=3, .*contradict each other"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 without MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
    ids=str,
)
def test_variables_of_another_launcher_are_named_at_once(environment, variables, named):
    environment(**variables)
    with pytest.raises(UserError, match=named):
        process.start(Config(), {})


def test_a_launcher_names_variables_of_another_one_and_hides_them_from_its_ranks(environment, monkeypatch, capsys):
    left = {"RANK": "3", "WORLD_SIZE": "8", "GROUP_RANK": "1", "MASTER_ADDR": "203.0.113.5", "TORCHELASTIC_RUN_ID": "x"}
    environment(**left, PET_LOCAL_ADDR="203.0.113.5", SLURM_PROCID="3", SLURM_NTASKS="8", TORCHELASTIC_HEALTH_CHECK_PORT="1")
    assert layout.read_layout().address == "localhost"
    (line,) = capsys.readouterr().err.splitlines()
    assert all(f"{name}={value}" in line for name, value in left.items()) and "PET_LOCAL_ADDR=203.0.113.5" in line
    assert not left.keys() & os.environ.keys() and "PET_LOCAL_ADDR" not in os.environ
    assert "SLURM" not in line and "HEALTH" not in line  # nothing reads the former, and the latter is an option of torch


# ------------------------------------------------------------------------------------------------------------------ stores


def answer_and_close(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server is closed
        while True:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()


def test_only_a_store_at_its_address_is_joined(monkeypatch):
    monkeypatch.setattr(addresses, "_ANSWERED_WITHIN", 0.5)
    monkeypatch.setattr(addresses, "_SILENT_FOR", 2.0)
    with socket.create_server(("localhost", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConnectionError, match=r"EADDRINUSE|in use"):
            addresses.serve("localhost", taken)
        threading.Thread(target=answer_and_close, args=(other,), daemon=True).start()
        with pytest.raises(ConnectionError, match="no store answers there"):
            addresses.join("localhost", taken, 5.0)
    match = "no store answers there"
    with socket.create_server(("localhost", 0)) as silent, pytest.raises(ConnectionError, match=match):
        addresses.join("localhost", silent.getsockname()[1], 5.0)
    with pytest.raises(ConnectionError, match="refused"):
        addresses.join("localhost", free_port(), 0.1)
    with pytest.raises(ConnectionError, match=r"[Nn]ame"):
        addresses.serve("nowhere.invalid")


def test_a_store_that_starts_later_is_waited_for():
    port = free_port()
    joined: list[object] = []
    waiting = threading.Thread(target=lambda: joined.append(addresses.join("localhost", port, 30.0)))
    waiting.start()
    store = addresses.serve("localhost", port)
    waiting.join(30)
    store.set("key", "value")
    assert joined[0].get("key") == b"value"


def test_a_missing_interface_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    assert "GLOO_SOCKET_IFNAME=lo,nowhere0: must be an interface that is up; there are: lo" in addresses.set_up_gloo()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert addresses.set_up_gloo() == ""


def test_ranks_share_the_cores_that_this_process_may_use(monkeypatch, environment):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6, 7})
    layout.share_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
