"""Rendezvous of the nodes (machines) of a run, before torchrun starts workers on them.

torchrun alone waits silently, and ends with a traceback that does not name the missing node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
import time
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.errors import NodeMissing, UserError

#: What Debian's /etc/hosts gives as the address of a machine's own name.
_OWN_NAME = "127.0.1.1"
#: The network interface for gloo and NCCL; by default they resolve the host's name, which may give that address.
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
#: Seconds between two log lines about missing nodes, and between two polls.
_LOG_INTERVAL_S, _POLL_INTERVAL_S = 30.0, 0.2
#: Timeout of one attempt to reach node 0, in seconds.
_CONNECT_S = 5.0


def meet(addr: str, port: int, *, rank: int, nodes: int, command: list[str], timeout_s: float) -> TCPStore:
    """Wait until all `nodes` have connected to node 0's port; returns the store, to be kept open while torchrun uses
    the same port.

    `command`: what this node is about to run. Raises `NodeMissing` after `timeout_s` seconds, with the missing nodes;
    `UserError` if the port cannot be opened, or if a node was started with another command.
    """
    wait = _Wait(f"{addr}:{port}", timeout_s)
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()
    if rank == 0:
        return _receive(port, nodes, digest, wait)
    while True:
        store = _reach(addr, port, wait)
        try:
            _be_received(store, rank, digest, wait)
            return store
        except RuntimeError:  # the store closed: it was that of an earlier run that is just ending
            wait.look([0])


class _Wait:
    """Waiting for nodes, with a timeout."""

    def __init__(self, place: str, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._began = self._told = time.monotonic()

    def look(self, missing: list[int]) -> None:
        """Sleep for one poll interval, logging now and then. Raises `NodeMissing` after the timeout."""
        who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        now = time.monotonic()
        if now - self._began > self._timeout_s:
            raise NodeMissing(
                f"{who} did not reach {self._place} within {self._timeout_s:g} s; start the same command there with "
                f"its node_rank, or check master_addr, master_port and the firewall"
            )
        if now - self._told >= _LOG_INTERVAL_S:
            self._told = now
            print(f"waiting for {who} at {self._place}", flush=True)
        time.sleep(_POLL_INTERVAL_S)


def _receive(port: int, nodes: int, digest: str, wait: _Wait) -> TCPStore:
    """Node 0: wait for the other nodes, then answer each."""
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        reason = "it is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise UserError(f"port {port} of node 0 cannot be opened: {reason}; choose another master_port") from None
    others = range(1, nodes)
    while missing := [rank for rank in others if not store.check([f"node {rank}"])]:
        wait.look(missing)
    differs = []
    for rank in others:
        nonce, theirs = store.get(f"node {rank}").decode().split()
        store.set(f"answer {rank}", f"{nonce} {digest}")
        differs += [rank] if theirs != digest else []
    if differs:
        time.sleep(5 * _POLL_INTERVAL_S)  # lets them read the answer, and fail with the same line
        raise _different(differs[0])
    return store


def _reach(addr: str, port: int, wait: _Wait) -> TCPStore:
    """Other nodes: wait for node 0's port."""
    while True:
        try:
            socket.create_connection((addr, port), timeout=_CONNECT_S).close()
            return TCPStore(
                addr, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S),
            )  # fmt: skip
        except (OSError, RuntimeError):  # not open yet, or closed again
            wait.look([0])


def _be_received(store: TCPStore, rank: int, digest: str, wait: _Wait) -> None:
    """Wait for node 0's answer to this process's nonce; a node 0 past its rendezvous gives none."""
    nonce = secrets.token_hex(8)
    store.set(f"node {rank}", f"{nonce} {digest}")
    while True:
        if store.check([f"answer {rank}"]):
            answered, theirs = store.get(f"answer {rank}").decode().split()
            if answered == nonce:
                if theirs != digest:
                    raise _different(rank)
                return
        wait.look([0])


def _different(rank: int) -> UserError:
    return UserError(
        f"node 0 and node {rank} were started with different commands; give all nodes the same settings (but for "
        f"node_rank) and the same work directory"
    )


def choose_interface(addr: str, port: int, *, patience_s: float = 30.0) -> str:
    """Have gloo and NCCL use the interface that routes to `addr`, unless the user has chosen one; returns gloo's.

    Raises `UserError` if `addr` has no route for `patience_s` seconds (a new pod's name takes a while to resolve),
    or if it is an address that other nodes cannot reach.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # UDP: only looks up the route
                own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"node 0's address {addr} cannot be reached: {error}; check master_addr") from None
            time.sleep(_POLL_INTERVAL_S)
    if address[0] == _OWN_NAME:
        raise UserError(
            f"node 0's address {addr} is {_OWN_NAME} here, which other nodes cannot reach; give its address on the "
            f"network as master_addr, or remove the line of {_OWN_NAME} from /etc/hosts"
        )
    for name, addresses in psutil.net_if_addrs().items():
        if any(_is(own, entry.address) for entry in addresses):
            os.environ.setdefault(_GLOO_INTERFACE, name)
            os.environ.setdefault(_NCCL_INTERFACE, f"={name}")  # exactly: without "=" it is a prefix
    return os.environ.get(_GLOO_INTERFACE, "whichever it finds")


def _is(own: ipaddress.IPv4Address | ipaddress.IPv6Address, text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]) == own
    except ValueError:  # a hardware address
        return False
