"""The address of this machine for others, and the network interface that gloo uses."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from one_step_off.cluster import network
from one_step_off.cluster.network import address_in_network, select_gloo_interface


def interfaces_that_are_up() -> list[tuple[str, str]]:
    """(name, IPv4 address)."""
    found = []
    statistics = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and statistics[name].isup:
                found.append((name, address.address))
    return found


def test_the_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")
    select_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "x"


def test_gloo_listens_on_the_interface_by_which_rank_0_is_reached(monkeypatch):
    """And not at the address of the machine's name, which may be a loopback."""
    interfaces = interfaces_that_are_up()
    assert ("lo", "127.0.0.1") in interfaces
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")  # so that monkeypatch restores it
    for name, address in interfaces:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        select_gloo_interface(address)
        assert os.environ["GLOO_SOCKET_IFNAME"] == name


@pytest.mark.parametrize("routed", [True, False])
def test_the_address_for_others_is_no_loopback_where_there_is_a_network(monkeypatch, routed: bool):
    if not routed:
        monkeypatch.setattr(network, "_address_of_route", lambda family: "")
    others = [address for _, address in interfaces_that_are_up() if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no IPv4 network")
    assert address_in_network() in others


def test_without_a_network_the_loopback_is_left(monkeypatch):
    monkeypatch.setattr(network, "_address_of_route", lambda family: "")
    for name, addresses in (loopback := psutil.net_if_addrs()).items():
        loopback[name] = [own for own in addresses if own.address in ("127.0.0.1", "::1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: loopback)
    assert address_in_network() == "127.0.0.1"
