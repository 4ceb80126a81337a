"""Switch packets in user space, for links with a delay on kernels without netem.

    python -m testbed.experiments.network_lab.relay '{"hosts": [descriptors of namespaces], "delay_s": 0.005, ...}'

Each host gets a TUN device eth0, and packets from one are written to another after `delay_s`. What a host sends is held
to its rate by the kernel's token bucket on eth0, what it receives by this switch, packet after packet. It costs CPU
time and bandwidth of its own: compare runs with a delay to runs through the same switch at 0, never to a bridge.

It runs inside the namespace of the lab's switch, so that it ends with the lab.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from testbed.experiments.network_lab.links import CLONE_NEWNET

MTU = 9000  # fewer packets for a program that handles each one
MOST_QUEUED_BYTES = 16 * 2**20  # then nothing more is read, and the senders' own queues fill
PACKETS_AT_ONCE = 16
LOST = (errno.EIO, errno.EAGAIN, errno.ENOBUFS)  # a device that is down or full: its packet is gone, as on a wire
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def make_device(namespace: int) -> int:
    """Make a TUN device named eth0 in the namespace of a descriptor, and return to this process's own namespace."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _enter(namespace)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        return device
    finally:
        _enter(own)
        os.close(own)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@dataclass
class Port:
    """One host's end. `waiting`: packets for it with the moment of their arrival, in its order."""

    device: int
    free_s: float = 0.0  # when its link has received what was sent so far
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


class Switch:
    """Packets in, packets out. `seconds_per_byte` of a link, 0: no limit."""

    def __init__(self, devices: Sequence[int], delay_s: float, seconds_per_byte: float):
        self.ports = [Port(device) for device in devices]
        self.delay_s, self.seconds_per_byte = delay_s, seconds_per_byte
        self.queued_bytes = 0

    def run(self) -> None:
        """Receive and deliver for ever."""
        port_of = {port.device: port for port in self.ports}
        devices = list(port_of)
        while True:
            next_s = self.deliver(time.monotonic())
            wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            readable = devices if self.queued_bytes < MOST_QUEUED_BYTES else []
            for device in select.select(readable, [], [], wait_s)[0]:
                self.receive(device)

    def receive(self, device: int) -> None:
        """Take what a host has sent."""
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            self.accept(packet, time.monotonic())

    def accept(self, packet: bytes, now_s: float) -> None:
        """Queue a packet for the host of its address, 10.77.0.N; others (IPv6, multicast) are dropped."""
        if packet[0] >> 4 != 4 or not 0 < packet[19] <= len(self.ports) or packet[16:19] != b"\x0a\x4d\x00":
            return
        port = self.ports[packet[19] - 1]
        port.free_s = max(now_s, port.free_s) + len(packet) * self.seconds_per_byte
        port.waiting.append((port.free_s + self.delay_s, packet))
        self.queued_bytes += len(packet)

    def deliver(self, now_s: float) -> float | None:
        """Hand over what has arrived by then. Returns the moment at which the next packet does; None: none is on its
        way."""
        next_s = None
        for port in self.ports:
            while port.waiting and port.waiting[0][0] <= now_s:
                _, packet = port.waiting.popleft()
                self.queued_bytes -= len(packet)
                try:
                    os.write(port.device, packet)
                except OSError as error:
                    if error.errno not in LOST:
                        raise
            if port.waiting:
                next_s = port.waiting[0][0] if next_s is None else min(next_s, port.waiting[0][0])
        return next_s


def main() -> None:
    asked = json.loads(sys.argv[1])
    devices = [make_device(namespace) for namespace in asked["hosts"]]
    print("ready", flush=True)
    rate = asked["bytes_per_s"]
    Switch(devices, asked["delay_s"], 1 / rate if rate else 0.0).run()


if __name__ == "__main__":
    main()
