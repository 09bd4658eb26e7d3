"""Ports: is the public one free, and which free ones the engines get."""

import socket
from collections.abc import Sequence


class PortTaken(Exception):
    """Somebody already listens on the port that the gateway wants."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"cannot listen on {host}:{port}: {reason}.\n"
            f"Stop what uses the port (`ss -ltnp 'sport = :{port}'` shows it), or choose another: --port {port + 1}"
        )


def require_free(host: str, port: int) -> None:
    """Check that ``host:port`` can be listened on.

    Raises:
        PortTaken: it cannot; the message says what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a past run that still linger do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(host, port, error.strerror or str(error)) from None


def free_loopback_ports(count: int) -> Sequence[int]:
    """Return ``count`` different ports that were free on 127.0.0.1 a moment ago."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
