"""The addresses by which others reach this machine, and the network interface that gloo uses."""

import ipaddress
import os
import socket

import psutil

DISCARD_PORT = 9
"""Any port does: connecting a UDP socket sends nothing."""

DISTANT = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses beyond the local network, of the ranges for documentation. Nothing is sent to them."""


def reachable_host(host: str) -> str:
    """`host`, or the address by which other nodes reach this one if `host` is empty (several
    nodes)."""
    from ray.util import get_node_ip_address

    return host or get_node_ip_address()


def address_in_network() -> str:
    """The address of this machine for processes elsewhere, without Ray: on one machine Ray knows
    the loopback alone.

    IPv4 before IPv6; that of the default route before those of other interfaces. The loopback where
    the machine has no network.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        address = _address_of_route(family) or _address_of_interface(family)
        if address:
            return address
    return "127.0.0.1"


def _address_of_route(family: socket.AddressFamily) -> str:
    """From which this machine would send to distant ones; "": there is no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((DISTANT[family], DISCARD_PORT))
            return probe.getsockname()[0]
    except OSError:
        return ""


def _address_of_interface(family: socket.AddressFamily) -> str:
    """The first that other machines could reach; "": there is none."""
    states = psutil.net_if_stats()
    for interface, addresses in psutil.net_if_addrs().items():
        if interface not in states or not states[interface].isup:
            continue
        for address in addresses:
            if address.family != family or "%" in address.address:  # with a scope: link-local
                continue
            if not ipaddress.ip_address(address.address).is_loopback:
                return address.address
    return ""


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
