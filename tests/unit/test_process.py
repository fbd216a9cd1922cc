"""Where gloo would listen: a machine that others cannot reach is refused before they wait for it."""

import socket

import pytest

from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.launch import process


@pytest.fixture
def resolver(monkeypatch):
    """Pretends that the hostname has these addresses, of which this machine has all but those of 203.0.113.0/24."""

    def pretend(*addresses: str) -> None:
        def look_up(name: str, *_, **__) -> list[tuple]:
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(process, "_can_bind", lambda address: not address.startswith("203.0.113."))
        monkeypatch.setattr(socket, "gethostname", lambda: "node7")
        monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.delenv("RDZV_ENDPOINT", raising=False)

    return pretend


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (["127.0.1.1"], "127.0.1.1"),
        (["127.0.1.1", "10.0.0.7"], "127.0.1.1"),
        (["::1"], "::1"),
        (["203.0.113.5"], "no address of this machine"),
        ([], "no address of this machine"),
        (["10.0.0.7"], ""),
        (["203.0.113.5", "10.0.0.7", "127.0.1.1"], ""),
        (["fe80::1%eth0"], ""),
    ],
    ids=str,
)
def test_the_first_address_that_can_be_bound_must_not_be_a_loopback(resolver, addresses, said):
    resolver(*addresses)
    expected = (
        f"the hostname node7 resolves to {said}, where other machines cannot reach its ranks; set GLOO_SOCKET_IFNAME to the "
        "interface that leads to the other machines (this machine has: eth0, ib0), and PET_LOCAL_ADDR to its address"
    )
    assert process.address_fault() == (expected if said else "")


def test_an_interface_that_the_user_has_chosen_is_not_questioned(resolver, monkeypatch):
    resolver("127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert process.address_fault() == ""


def test_launchers_that_meet_at_a_loopback_address_are_all_on_this_machine(resolver, monkeypatch):
    resolver("127.0.1.1")
    monkeypatch.setenv("RDZV_ENDPOINT", "localhost:29500")
    assert process.address_fault() == ""


def test_only_ranks_of_several_machines_are_refused_and_before_the_process_group(resolver, monkeypatch):
    def joined(*_, **__) -> None:
        raise ConnectionError("joined the group")

    resolver("127.0.1.1")
    monkeypatch.setattr(process.dist, "init_process_group", joined)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"hostname node7 resolves to 127\.0\.1\.1"):
        process.start(Config())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConnectionError, match="joined the group"):
        process.start(Config())


def test_an_address_of_this_machine_can_be_bound_and_another_cannot():
    assert process._can_bind("127.0.0.1") and not process._can_bind("203.0.113.5")
