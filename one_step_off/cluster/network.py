"""The address by which other nodes reach this one, and the network interface that gloo uses."""

import os
import socket

import psutil

DISCARD_PORT = 9
"""Any port does: connecting a UDP socket sends nothing."""


def reachable_host(host: str) -> str:
    """`host`, or the address by which other nodes reach this one if `host` is empty (several
    nodes)."""
    from ray.util import get_node_ip_address

    return host or get_node_ip_address()


def select_gloo_interface(host: str) -> None:
    """Let gloo use the network interface by which this process reaches `host`, unless
    GLOO_SOCKET_IFNAME names one.

    By default gloo listens at the address of the machine's name, which many machines resolve to
    their loopback.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, DISCARD_PORT))
        local_address = probe.getsockname()[0]
    for interface, addresses in psutil.net_if_addrs().items():
        # An IPv6 address may carry its scope: "fe80::1%eth0".
        if any(address.address.split("%")[0] == local_address for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
