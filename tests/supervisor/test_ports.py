"""Ports: a taken one is refused with a way out, free ones are really free and different."""

import socket

import pytest

from gateway.supervisor.ports import PortTaken, free_loopback_ports, require_free


def test_a_taken_port_is_refused_and_the_message_says_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"127\.0\.0\.1:{port}: Address already in use") as caught:
            require_free("127.0.0.1", port)
    assert f"--port {port + 1}" in str(caught.value)


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    ports = free_loopback_ports(4)
    assert len(set(ports)) == 4
    for port in ports:
        require_free("127.0.0.1", port)
