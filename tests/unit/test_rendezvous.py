"""Launchers of several nodes meet, name what is wrong, and end when node 0 is gone."""

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

from tests.end_to_end.launcher import free_port
from tests.waiting import PATIENCE, until
from titanlite.ground.errors import UserError
from titanlite.launch import rendezvous
from titanlite.launch.layout import Layout
from titanlite.launch.rendezvous import Rendezvous

Start = Callable[..., Rendezvous]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port, monkeypatch) -> Iterator[Start]:
    """Starts the launcher of a node; all are closed afterwards."""
    monkeypatch.setattr(rendezvous, "_INTERVAL", 0.02)
    monkeypatch.setattr(rendezvous, "_LEAVING", 600.0)
    started: list[Rendezvous] = []

    def one(node: int, nodes: int = 2, ranks: int = 1, patience: int = 30) -> Rendezvous:
        layout = Layout(ranks, nodes, node, "localhost", port, "localhost", 0, patience)
        started.append(Rendezvous(layout, unreachable=0.5))
        return started[-1]

    yield one
    for launcher in started:
        launcher.shutdown()


@pytest.fixture
def pair(start) -> list[Rendezvous]:
    """Two nodes after their rendezvous."""
    nodes = [start(0), start(1)]
    meet(*nodes)
    return nodes


def meet(*launchers: Rendezvous) -> list[RendezvousInfo | Exception]:
    """The result, or the error, of a simultaneous rendezvous of each launcher."""
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


def test_nodes_get_ranks_by_their_numbers_and_each_start_has_its_own_store(start):
    nodes = [start(number, 3) for number in range(3)]
    stores = []
    for _ in range(2):
        met = meet(*nodes)
        assert [info.rank for info in met] == [0, 1, 2] and {info.world_size for info in met} == {3}
        met[2].store.set("key", "value")
        assert met[1].store.get("key") == b"value"
        stores.append({info.bootstrap_store_info.master_port for info in met})
    assert len(stores[0]) == len(stores[1]) == 1 and stores[0] != stores[1]


def test_a_node_that_starts_its_ranks_again_makes_the_others_do_so(pair):
    assert pair[0].num_nodes_waiting() == 0
    restarting = threading.Thread(target=pair[1].next_rendezvous)
    restarting.start()
    until(lambda: pair[0].num_nodes_waiting() == 1)
    assert pair[0].next_rendezvous().rank == 0
    restarting.join()
    assert pair[0].num_nodes_waiting() == 0


@pytest.mark.parametrize(
    "others, words",
    [
        ([{"node": 1}, {"node": 1}], ["NODE_RANK=1 is used twice: by process "]),
        ([{"node": 1, "nodes": 4}], ["NNODES=4 for process ", "NNODES=3 for node 0"]),
        ([{"node": 1, "ranks": 2}], ["NGPU=2", "NGPU=1", "must be equal"]),
    ],
)
def test_incompatible_launchers_all_end_at_once_and_name_the_variable(start, others, words):
    for error in meet(start(0, 3), *(start(**{"nodes": 3, **other}) for other in others)):
        assert isinstance(error, UserError) and all(word in str(error) for word in words), error


def test_a_late_launcher_ends_and_the_run_continues(start, pair):
    (error,) = meet(start(1))
    assert isinstance(error, UserError) and "NODE_RANK=1 is used twice" in str(error)
    assert [node.num_nodes_waiting() for node in pair] == [0, 0]


def test_a_busy_port_is_named_at_once(start, port):
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"RDZV_ENDPOINT=localhost:{port}: node 0 cannot"):
        start(0)


@pytest.mark.parametrize(
    "node, words", [(0, "launchers are missing, with NODE_RANK 1, 2"), (1, "node 0 does not answer (Connection refused)")]
)
def test_a_missing_node_is_named_and_awaited_until_the_timeout(start, monkeypatch, capsys, node, words):
    monkeypatch.setattr(rendezvous, "_NAMED_AFTER", 0.3)
    (error,) = meet(start(node, 3, patience=1))
    assert isinstance(error, RendezvousTimeoutError) and words in str(error) and "RDZV_TIMEOUT=1" in str(error)
    (named,) = capsys.readouterr().err.splitlines()
    assert words in named and "waiting for RDZV_TIMEOUT=1 seconds" in named


def test_another_program_at_the_endpoint_is_not_taken_for_node_0(start, port):
    with socket.create_server(("", port)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        other = start(1)
        assert other._exchange() == "another program answers"


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1", b"[" * 100_000])
def test_other_clients_get_no_answer_and_change_nothing(start, port, text):
    first = start(0)
    with socket.create_connection(("localhost", port)) as connection:
        connection.sendall(text + b"\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert first.server is not None and first.server.members == {}


def test_the_others_end_when_the_launcher_of_node_0_has_ended(pair):
    pair[0].shutdown()
    until(lambda: pair[1].lost)
    with pytest.raises(RendezvousConnectionError, match=r"node 0 has not answered at localhost:.* \(Connection refused\)"):
        pair[1].num_nodes_waiting()


def test_the_others_end_when_node_0_no_longer_answers_even_if_they_are_stuck(start, monkeypatch, capfd):
    codes: list[int] = []
    monkeypatch.setattr(rendezvous, "_ANSWERED_WITHIN", 0.2)
    monkeypatch.setattr(rendezvous, "_LEAVING", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    nodes = [start(0), start(1)]
    meet(*nodes)
    with nodes[0].server.lock:  # it accepts connections, like a node whose launcher hangs
        until(lambda: codes and nodes[1].lost)  # node 0's own watch may be first
    assert codes[0] == 1 and nodes[1].lost.startswith("node 0 has not answered at localhost:")
    assert "the run is over" in capfd.readouterr().err


def test_a_node_that_has_ended_is_not_waited_for(pair, monkeypatch):
    """Also where its thread gets no time to send another request."""
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "_INTERVAL", 0.0)
        pair[1].shutdown()
    (error,) = meet(pair[0])
    assert isinstance(error, RendezvousClosedError) and "has ended" in str(error)
