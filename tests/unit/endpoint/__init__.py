"""Tests of the HTTP endpoint, over real sockets of the loopback."""
