"""Launchers of several machines meet, name what is wrong, and end when machine 0 is gone."""

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from tests.waiting import PATIENCE, until
from titanlite.errors import UserError
from titanlite.launch import rendezvous
from titanlite.launch.layout import Layout
from titanlite.launch.rendezvous import Rendezvous

Start = Callable[..., Rendezvous]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(port, monkeypatch) -> Iterator[Start]:
    """Starts the launcher of a machine; all are closed afterwards."""
    monkeypatch.setattr(rendezvous, "_INTERVAL", 0.02)
    monkeypatch.setattr(rendezvous, "_LEAVING", 600.0)
    started: list[Rendezvous] = []

    def one(machine: int, machines: int = 2, ranks: int = 1, patience: int = 30) -> Rendezvous:
        layout = Layout(ranks, machines, machine, "localhost", port, "localhost", 0, patience)
        started.append(Rendezvous(layout, unreachable=0.5))
        return started[-1]

    yield one
    for launcher in started:
        launcher.shutdown()


def meet(*launchers: Rendezvous) -> list[RendezvousInfo | Exception]:
    """What each of them meets, or raises, at the same time."""
    results: list[RendezvousInfo | Exception] = [AssertionError("it never ended")] * len(launchers)

    def one(number: int) -> None:
        try:
            results[number] = launchers[number].next_rendezvous()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(launchers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def test_machines_get_the_ranks_of_their_numbers_and_each_start_has_a_store_of_its_own(start):
    machines = [start(number, 3) for number in range(3)]
    stores = []
    for _ in range(2):
        met = meet(*machines)
        assert [info.rank for info in met] == [0, 1, 2] and {info.world_size for info in met} == {3}
        met[2].store.set("key", "value")
        assert met[1].store.get("key") == b"value"
        stores.append({info.bootstrap_store_info.master_port for info in met})
    assert len(stores[0]) == len(stores[1]) == 1 and stores[0] != stores[1]


def test_a_machine_that_starts_its_ranks_again_makes_the_others_do_so(start):
    machines = [start(0), start(1)]
    meet(*machines)
    assert machines[0].num_nodes_waiting() == 0
    restarting = threading.Thread(target=machines[1].next_rendezvous)
    restarting.start()
    until(lambda: machines[0].num_nodes_waiting() == 1)
    assert machines[0].next_rendezvous().rank == 0
    restarting.join()
    assert machines[0].num_nodes_waiting() == 0


def test_one_machine_needs_no_port(start, port):
    with socket.create_server(("", port)):
        (alone,) = meet(start(0, 1))
    assert (alone.rank, alone.world_size) == (0, 1)


@pytest.mark.parametrize(
    "others, words",
    [
        ([{"machine": 1}, {"machine": 1}], ["NODE_RANK=1 is used twice: by process "]),
        ([{"machine": 1, "machines": 4}], ["NNODES=4 for process ", "NNODES=3 for machine 0"]),
        ([{"machine": 1, "ranks": 2}], ["NGPU=2", "NGPU=1", "must be equal"]),
    ],
)
def test_launchers_that_do_not_fit_together_all_end_at_once_with_the_variable(start, others, words):
    for error in meet(start(0, 3), *(start(**{"machines": 3, **other}) for other in others)):
        assert isinstance(error, UserError) and all(word in str(error) for word in words), error


def test_a_launcher_that_comes_too_late_ends_and_the_run_goes_on(start):
    machines = [start(0), start(1)]
    meet(*machines)
    (error,) = meet(start(1))
    assert isinstance(error, UserError) and "NODE_RANK=1 is used twice" in str(error)
    assert [machine.num_nodes_waiting() for machine in machines] == [0, 0]


def test_a_busy_port_is_named_at_once(start, port):
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"RDZV_ENDPOINT=localhost:{port}: machine 0 cannot"):
        start(0)


@pytest.mark.parametrize(
    "machine, words", [(0, "launchers are missing, with NODE_RANK 1, 2"), (1, "machine 0 does not answer (refused)")]
)
def test_a_missing_machine_is_named_and_waited_for_until_the_timeout(start, monkeypatch, capsys, machine, words):
    monkeypatch.setattr(rendezvous, "_NAMED_AFTER", 0.3)
    (error,) = meet(start(machine, 3, patience=1))
    assert isinstance(error, RendezvousTimeoutError) and words in str(error) and "RDZV_TIMEOUT=1" in str(error)
    (named,) = capsys.readouterr().err.splitlines()
    assert words in named and "waiting for RDZV_TIMEOUT=1 seconds" in named


def test_another_program_at_the_endpoint_is_not_taken_for_machine_0(start, port):
    with socket.create_server(("", port)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        other = start(1)
        assert other._ask() == "another program answers"


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"GET / HTTP/1.1", b"[" * 100_000, b'{"machine": true, "machines": 2, "ranks": 1, "who": "", "key": ""}'],
)
def test_what_is_no_launcher_gets_no_answer_and_changes_nothing(start, port, text):
    first = start(0)
    with socket.create_connection(("localhost", port)) as connection:
        connection.sendall(text + b"\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert first.meeting is not None and first.meeting.members == {}


def test_the_others_end_when_the_launcher_of_machine_0_has_ended(start):
    machines = [start(0), start(1)]
    meet(*machines)
    machines[0].shutdown()
    until(lambda: machines[1].lost)
    with pytest.raises(RendezvousConnectionError, match="the launcher of machine 0 has ended"):
        machines[1].num_nodes_waiting()


def test_the_others_end_when_machine_0_does_not_answer_any_more_even_if_they_are_stuck(start, monkeypatch, capfd):
    codes: list[int] = []
    monkeypatch.setattr(rendezvous, "_ANSWERED_WITHIN", 0.2)
    monkeypatch.setattr(rendezvous, "_LEAVING", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    machines = [start(0), start(1)]
    meet(*machines)
    with machines[0].meeting.lock:  # it accepts connections, as a machine does whose launcher hangs
        until(lambda: codes and machines[1].lost)  # the watch of machine 0 itself may come first
    assert codes[0] == 1 and machines[1].lost.startswith("machine 0 has not answered at localhost:")
    assert "the run is over" in capfd.readouterr().err


def test_who_has_ended_for_good_is_not_waited_for(start):
    machines = [start(0), start(1)]
    meet(*machines)
    machines[1].shutdown()
    (error,) = meet(machines[0])
    assert isinstance(error, RendezvousClosedError) and "has ended" in str(error)
