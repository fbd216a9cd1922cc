"""The rendezvous of the nodes before every start of the ranks; while ranks run, the check that node 0 still answers.

Node 0 listens at RDZV_ENDPOINT. Every launcher, also that of node 0, sends it the same request again and again: one line
of JSON on a connection of its own, answered by one line. A request joins a round, which is a start of the ranks, and the answer
says whether the round is complete, which nodes are missing, and what is wrong. So a request that is lost costs nothing, no
call blocks for longer than its timeout, and the clocks of the nodes need not agree. torch's own rendezvous waits without
limit for a store whose node has died.
"""

import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from titanlite.ground.errors import UserError
from titanlite.launch.addresses import join, serve
from titanlite.launch.layout import Layout

_NAMED_AFTER = 60.0  # seconds until the missing nodes are named
_ANSWERED_WITHIN = 10.0  # seconds for one request
_INTERVAL = 0.5  # seconds between two of them
_LEAVING = 30.0  # seconds that this launcher may take to end by itself, when node 0 is gone
_LOCAL_ADDR = "set PET_LOCAL_ADDR to an address of node 0 that leads to it, or unset it"
_LINE = 2**20  # bytes of a request or an answer, which may list 100,000 missing nodes

_Number = Annotated[int, Field(ge=0, le=10**9)]
_Text = Annotated[str, Field(max_length=1000)]


class Request(BaseModel):
    """What a launcher sends to node 0."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    node: _Number
    nodes: _Number
    ranks: _Number
    who: _Text  # for messages
    key: _Text  # of this launcher and no other
    round: _Number = 0  # the start of the ranks that it joins
    store: tuple[_Text, _Number] = ("", 0)  # of the round, from node 0
    ended: bool = False  # it starts no more ranks


class Answer(BaseModel):
    """The answer of node 0 to a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    round: _Number  # of the request
    fault: str
    missing: list[_Number]  # nodes that have not joined the round
    newest: _Number  # the newest round that a node has joined
    ended: _Text  # a launcher that starts no more ranks; or ""
    store: tuple[_Text, _Number]


class RendezvousServer(socketserver.ThreadingTCPServer):
    """On node 0: answers the requests of all launchers, and remembers who has joined which round."""

    daemon_threads = True

    def __init__(self, port: int, nodes: int):
        self.nodes = nodes
        self.members: dict[int, Request] = {}  # node -> its newest request
        self.fault = ""  # ends the start on all nodes
        self.lock = threading.Lock()
        super().__init__(("", port), _Handler, bind_and_activate=False)
        self.socket.close()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
        threading.Thread(target=self.serve_forever, daemon=True, name="rendezvous server").start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that end early or come from another program."""

    def answer(self, request: Request) -> Answer:
        with self.lock:
            fault = self._fault_of(request)
            if not fault:
                self.members[request.node] = request
            elif len(self.members) < self.nodes:  # a launcher that comes too late does not end a run
                self.fault = self.fault or fault
            members = self.members.values()
            joined = {member.node for member in members if member.round >= request.round}
            return Answer(
                round=request.round,
                fault=fault or self.fault,
                missing=[node for node in range(self.nodes) if node not in joined],
                newest=max((member.round for member in members), default=0),
                ended=next((member.who for member in members if member.ended), ""),
                store=self.members[0].store if 0 in self.members else ("", 0),
            )

    def _fault_of(self, request: Request) -> str:
        """What is wrong with a launcher that joins; or ""."""
        if request.nodes != self.nodes:
            return f"NNODES={request.nodes} for {request.who}, and NNODES={self.nodes} for node 0: must be equal"
        for other in self.members.values():
            if other.node == request.node and other.key != request.key:
                return f"NODE_RANK={request.node} is used twice: by {other.who} and by {request.who}"
            if other.ranks != request.ranks:
                return f"NGPU={request.ranks} for {request.who}, and NGPU={other.ranks} for {other.who}: must be equal"
        return "" if request.node < self.nodes else f"NODE_RANK={request.node}: NNODES={self.nodes}"


class _Handler(socketserver.StreamRequestHandler):
    timeout = _ANSWERED_WITHIN
    server: RendezvousServer

    def handle(self) -> None:
        answer = self.server.answer(Request.model_validate_json(self.rfile.readline(_LINE)))
        self.wfile.write(answer.model_dump_json().encode() + b"\n")


class Rendezvous(StaticTCPRendezvous):
    """The rendezvous of torch's agent, of `layout.nodes` nodes, which may be 1.

    Like PyTorch's static rendezvous it has a fixed number of nodes. They meet before every start, which has a store of its own.
    """

    def __init__(self, layout: Layout, unreachable: float):
        """unreachable: seconds without an answer of node 0 after which the run ends.

        Raises UserError if this is node 0 and cannot listen.
        """
        super().__init__(layout.host, layout.port, layout.node, layout.nodes, "titanlite", layout.patience)
        self.layout, self.unreachable = layout, unreachable
        self.endpoint = f"{layout.host}:{layout.port}"
        self.address: tuple[str, int] | None = None  # of node 0, once it has answered
        self.answer: Answer | str = "not yet"  # the newest one, or why there is none
        self.lost = ""  # why the run ends
        self.closed = False
        self.sending = threading.Lock()  # around a request: none arrives after a later one
        self.store: TCPStore | None = None
        self.request = Request(
            node=layout.node,
            nodes=layout.nodes,
            ranks=layout.local_ranks,
            who=f"process {os.getpid()} on {socket.gethostname()}",
            key=secrets.token_hex(16),
        )
        self.server = None
        if layout.nodes > 1 and layout.node == 0:
            try:
                self.server = RendezvousServer(layout.port, layout.nodes)
            except OSError as error:
                raise UserError(
                    f"RDZV_ENDPOINT={self.endpoint}: node 0 cannot listen at port {layout.port}: {error.strerror}; another "
                    "program has it, or another launcher with NODE_RANK=0 on this node"
                ) from None

    def get_backend(self) -> str:
        return "titanlite"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other nodes. Raises UserError for a wrong NODE_RANK, NNODES or NGPU, else a RendezvousError."""
        layout, host, port, number = self.layout, "localhost", 0, self.request.round + 1
        if layout.nodes == layout.local_ranks == 1:  # needs no address, and no network
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(host, port))
        if layout.node == 0:
            host = layout.address or (host if layout.nodes == 1 else socket.getfqdn())
            try:
                self.store = serve(host)
            except ConnectionError as error:
                remedy = f"; {_LOCAL_ADDR}" if layout.nodes > 1 else ""
                raise UserError(f"node 0 does not reach itself at {host}: {error}{remedy}") from None
            port = self.store.port
        if layout.nodes > 1:
            self.request = self.request.model_copy(update={"round": number, "store": (host, port)})
            if number == 1:
                threading.Thread(target=self._keep_requesting, daemon=True, name="rendezvous").start()
            host, port = self._wait_for_round()
        if layout.node > 0:
            try:
                self.store = join(host, port, _ANSWERED_WITHIN)
            except ConnectionError as error:
                raise RendezvousConnectionError(
                    f"node 0 is not reached at {host}:{port} ({error}); there, {_LOCAL_ADDR}"
                ) from None
        assert self.store is not None
        return RendezvousInfo(self.store, layout.node, layout.nodes, RendezvousStoreInfo(host, port))

    def num_nodes_waiting(self) -> int:
        """The agent calls this while the ranks run, and restarts them for a number above 0."""
        self._check()
        return int(isinstance(self.answer, Answer) and self.answer.newest > self.request.round)

    def shutdown(self) -> bool:
        """Tells node 0 that this launcher starts no more ranks. Node 0 answers until all nodes can have read a fault."""
        self.request = self.request.model_copy(update={"ended": True})
        if isinstance(self.answer, Answer):  # else node 0 does not answer, or there is no other node
            self._exchange()
        self.closed = True
        if self.server:
            time.sleep(4 * _INTERVAL)
            self.server.shutdown()
            self.server.server_close()
        return True

    def _check(self) -> None:
        if self.lost:
            raise RendezvousConnectionError(self.lost)

    def _wait_for_round(self) -> tuple[str, int]:
        """Waits until the round is complete; -> (host, port) of its store."""
        begun, named, patience = time.monotonic(), False, self.layout.patience
        while True:
            self._check()
            answer = self.answer
            state = f"RDZV_ENDPOINT={self.endpoint}: node 0 does not answer ({answer})"
            if isinstance(answer, Answer) and answer.round == self.request.round:
                if answer.fault:
                    raise UserError(answer.fault)
                if answer.ended:
                    raise RendezvousClosedError(f"the launcher {answer.ended} has ended")
                if not answer.missing:
                    return answer.store
                numbers = ", ".join(map(str, answer.missing))
                state = f"NNODES={self.layout.nodes}: launchers are missing, with NODE_RANK {numbers}"
            waited = time.monotonic() - begun
            if waited > _NAMED_AFTER and not named:
                named = True
                print(f"{state}; waiting for RDZV_TIMEOUT={patience} seconds", file=sys.stderr, flush=True)
            if waited > patience:
                raise RendezvousTimeoutError(f"{state} after RDZV_TIMEOUT={patience} seconds")
            time.sleep(0.1)

    def _keep_requesting(self) -> None:
        """In a thread: sends the request, and ends the run where node 0 is gone.

        The seconds of each attempt are summed, with a limit each: the time of a suspended launcher does not count. If the main
        thread does not end the run, this thread does: the main thread may wait inside torch, without limit, for node 0's store.
        """
        silent = 0.0
        while not (self.lost or self.closed):
            begun = time.monotonic()
            self.answer = answer = self._exchange()
            time.sleep(_INTERVAL)
            if self.address is None:  # `_wait_for_round` waits for node 0
                continue
            silent = silent + min(time.monotonic() - begun, _ANSWERED_WITHIN + _INTERVAL) if isinstance(answer, str) else 0.0
            if silent > self.unreachable:
                self.lost = f"node 0 has not answered at {self.endpoint} for {silent:.0f} s ({answer})"
        time.sleep(_LEAVING)
        if not self.closed:
            os.write(sys.stderr.fileno(), f"{self.lost}; the run is over\n".encode())
            os._exit(1)  # the kernel ends the ranks with it

    def _exchange(self) -> Answer | str:
        """The answer of node 0 to the request, or why there is none."""
        address = self.address or (self.layout.host.strip("[]"), self.layout.port)
        try:
            with self.sending, socket.create_connection(address, _ANSWERED_WITHIN) as connection:
                connection.sendall(self.request.model_dump_json().encode() + b"\n")
                with connection.makefile("rb") as lines:
                    answer = Answer.model_validate_json(lines.readline(_LINE))
                self.address = connection.getpeername()[:2]  # name resolution may fail later
                return answer
        except ValidationError:
            return "another program answers"
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
