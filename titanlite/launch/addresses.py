"""Stores and addresses of nodes. Each is checked first: torch and gloo wait until a timeout, or print frames of C++."""

import contextlib
import ipaddress
import os
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, TCPStore

from titanlite.ground.torch_private import one_thread_per_gloo_group

_ANSWERED_WITHIN = 10.0  # seconds, by a store
_SILENT_FOR = 60.0  # seconds, by a store whose process is stopped for a while
_TIMEOUT = timedelta(minutes=5)  # PyTorch's default of a store
_UP = "bring the loopback interface up: ip link set lo up"


def serve(host: str, port: int = 0, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Starts a store on this node, and checks that it is reached at `host`. port 0: any. Raises ConnectionError as `join`."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_ANSWERED_WITHIN).close()
    except OSError as error:
        raise ConnectionError(f"{error.strerror or error}, not even at localhost; {_UP}") from None
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise ConnectionError(str(error).partition("\n")[0]) from None
    join(host, store.port, _ANSWERED_WITHIN)
    return store


def join(host: str, port: int, patience: float, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A client of the store at an address. patience: seconds to keep trying. timeout: of the store's operations.

    Raises ConnectionError, whose text is the reason. PyTorch by itself waits for its timeout, then prints frames of C++.
    """
    ends = time.monotonic() + patience
    while True:
        left = ends - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.1, min(5.0, left))).close()
            break
        except OSError as error:  # also an unknown name: name resolution may start later
            if left < 0.5:
                raise ConnectionError(error.strerror or str(error) or type(error).__name__) from None
        time.sleep(0.2)
    found: list[TCPStore] = []

    def greet() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=answered_within))

    answered_within = timedelta(seconds=_ANSWERED_WITHIN)
    greeting = threading.Thread(target=greet, daemon=True)  # no timeout of PyTorch's ends it where nobody answers
    greeting.start()
    greeting.join(_SILENT_FOR)
    if not found:
        raise ConnectionError("no store answers there")
    found[0].set_timeout(timeout)
    return found[0]


def set_up_gloo() -> str:
    """Sets up the gloo groups that this process will join; returns why gloo cannot listen on this node, which one rank needs
    too, or "".
    """
    try:
        _gloo_devices()
    except RuntimeError as error:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        what = f"GLOO_SOCKET_IFNAME={names}: must be an interface that is up; there are: {_interfaces()}" if names else _UP
        return f"gloo has no address to listen at; {what} ({str(error).splitlines()[0]})"
    one_thread_per_gloo_group(_gloo_devices)
    return ""


def _gloo_devices() -> list[ProcessGroupGloo.Device]:
    """Those that PyTorch chooses for a group."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").removesuffix(",").split(",")
    return [
        ProcessGroupGloo.create_device(interface=name) if name else ProcessGroupGloo.create_default_device() for name in names
    ]


def hostname_fault() -> str:
    """Why other nodes cannot reach the address at which gloo would listen; or "".

    Without GLOO_SOCKET_IFNAME, gloo listens at the first address of the hostname that it can bind, or at the loopback address
    (ProcessGroupGloo::createDefaultDevice). The /etc/hosts of Debian maps the hostname to 127.0.1.1. The ranks of
    the other nodes would wait until the timeout. Launchers that meet at a loopback address are all on this node.
    """
    endpoint = os.environ.get("RDZV_ENDPOINT", "").rpartition(":")[0]
    if os.environ.get("GLOO_SOCKET_IFNAME") or endpoint in ("localhost", "127.0.0.1", "[::1]"):
        return ""
    name, address = socket.gethostname(), ""
    with contextlib.suppress(socket.gaierror):  # no address
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        address = next(filter(_can_bind, addresses), "")
    if address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    return (
        f"the hostname {name} resolves to {address or 'no address of this node'}, where other nodes cannot reach its "
        "ranks; set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes (this node has: "
        f"{_interfaces(but='lo')}), and PET_LOCAL_ADDR to its address"
    )


def _interfaces(but: str = "") -> str:
    return ", ".join(name for _, name in socket.if_nameindex() if name != but) or "none but lo"


def _can_bind(address: str) -> bool:
    """Whether this node has an address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
