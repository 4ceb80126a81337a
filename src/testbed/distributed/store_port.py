"""Check and open the port where the ranks find each other, where rank 0 and no launcher holds it. No torch.

PyTorch reports a taken port after seconds, from rank 0 alone, while the others wait at whatever listens there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket

from testbed.distributed.launch import Launch, whole_number
from testbed.errors import InputError


class PortTaken(InputError):
    """Another program listens where the ranks are to meet."""


def is_held_here(launch: Launch) -> bool:
    """Return whether this rank opens the port: rank 0, unless torchrun does."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return launch.is_distributed and launch.rank == 0 and not by_launcher


def check_port(launch: Launch) -> None:
    """Check that the port is free, before PyTorch is loaded and before another rank waits there.

    Raises:
        PortTaken: one sentence with a port that is free.
    """
    address, port = where_ranks_meet()
    if is_held_here(launch) and port is not None:
        listen(address, port).close()


def where_ranks_meet() -> tuple[str, int | None]:
    """Return address and port as the launcher set them. None: what is set is no port, which PyTorch reports."""
    port = whole_number(os.environ.get("MASTER_PORT", ""))
    return os.environ.get("MASTER_ADDR", ""), port if port is not None and port < 1 << 16 else None


def listen(address: str, port: int) -> socket.socket:
    """Listen at this address if it is one of the loopback, else at all addresses of this machine.

    A name may mean an address of the loopback here and another one on other machines.

    Raises:
        PortTaken: another process does.
    """
    try:
        if is_loopback(address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise PortTaken(
            f"MASTER_PORT={port}, where the ranks meet, cannot be listened at ({os.strerror(error.errno or 0)}): "
            f"another run, or what is left of one, has it; start with --master_port {free_port()}, before src/gpt2.py "
            "(torchrun: --master-port)"
        ) from None


def is_loopback(address: str) -> bool:
    """Return whether only this machine can mean it."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def free_port() -> int:
    """Return a free port, outside those that the system hands out: gloo of another run takes such ports."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
