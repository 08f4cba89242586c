"""The address by which other nodes reach this one, and the interface that gloo uses."""

import os
import socket

import psutil


def reachable_host(host: str) -> str:
    """`host`, or where it is empty (several nodes) the address by which other nodes reach this one."""
    from ray.util import get_node_ip_address

    return host or get_node_ip_address()


def select_gloo_interface(host: str) -> None:
    """Let gloo use the network interface by which this process reaches `host`, unless GLOO_SOCKET_IFNAME names one. Left
    alone, it listens at the address of the machine's name, which many machines take for their loopback."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing
        mine = s.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == mine for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
