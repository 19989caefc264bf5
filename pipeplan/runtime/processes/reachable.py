"""Do nodes reach each other on ports that nobody has opened for them, as gloo and NCCL take them?"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from ...errors import BadInput
from ..training.state.checkpoint import Peers
from .agreement import INTERFACE, Statement

TRY_S: Final = 10.0
HELP: Final = (
    "gloo and NCCL take any free ports between nodes, so let them through the firewall, or set "
    f"{INTERFACE} and NCCL_SOCKET_IFNAME to the interface of a network without one"
)
_ADDRESS: Final = 0x8915  # what Linux calls SIOCGIFADDR


def check_reachable(everybodys: Sequence[Statement], peers: Peers) -> None:
    """Raise BadInput on all ``peers`` where a node cannot reach the next one; each tries one connection.

    A firewall that drops what it doesn't know lets ranks meet in the store, and then wait for each other for minutes.
    """
    machines = [said.machine for said in everybodys]
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)]
    if len(firsts) == 1:
        return
    with ExitStack() as held:
        listens = None
        if peers.rank in firsts:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = held.enter_context(socket.create_server(("", 0), family=family, dualstack_ipv6=both))
            listens = json.dumps([_address(everybodys[peers.rank]), listener.getsockname()[1]])
        places = peers.gathered(listens)
        wrong = None
        if peers.rank in firsts:
            other = firsts[(firsts.index(peers.rank) + 1) % len(firsts)]
            address, port = json.loads(places[other] or "")
            reason = _unreached(address, port)
            if reason is not None:
                there = f"rank {other}'s host {everybodys[other].host} ({address}, port {port})"
                wrong = f"rank {peers.rank} on {everybodys[peers.rank].host} doesn't reach {there}: {reason}; {HELP}"
        wrong = next(filter(None, peers.gathered(wrong, TRY_S)), None)
    if wrong is not None:
        raise BadInput(wrong)


def _unreached(address: str, port: int) -> str | None:
    """Return why no connection comes about; None if one does, or nobody knows the address."""
    if not address:
        return None
    try:
        socket.create_connection((address, port), TRY_S).close()
    except TimeoutError:
        return f"no answer within {TRY_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _address(said: Statement) -> str:
    """Return the address at which gloo listens; empty where that isn't known."""
    name = os.environ.get(INTERFACE, "").partition(",")[0]
    if not name:
        return said.address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked.fileno(), _ADDRESS, struct.pack("256s", name.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])
