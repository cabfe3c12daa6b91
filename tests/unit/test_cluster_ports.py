import os
import socket
from collections.abc import Iterator

import pytest

from cluster import ports

# Two lines of /proc/net/tcp: 127.0.0.1:8265 listening, and a connection of it.
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:2049 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0 100 0 0 10 0
   1: 0100007F:2049 0100007F:D431 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0 100 0 0 10 0
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_only_listening_sockets_of_the_table_count() -> None:
    assert ports.parse_listeners(TABLE) == [ports.Listener("127.0.0.1", 8265, "4711")]


@pytest.mark.parametrize(
    ("text", "address", "is_loopback"),
    [
        ("0100007F", "127.0.0.1", True),
        ("00000000", "0.0.0.0", False),
        ("0200A8C0", "192.168.0.2", False),
        ("00000000000000000000000001000000", "::1", True),
        ("00000000000000000000000000000000", "::", False),
        ("0000000000000000FFFF00000100007F", "::ffff:127.0.0.1", True),
        ("0000000000000000FFFF00000200A8C0", "::ffff:192.168.0.2", False),
    ],
)
def test_addresses_are_decoded(text: str, address: str, is_loopback: bool) -> None:
    assert ports.decode_address(text) == address
    assert ports.Listener(address, 1, "").is_loopback is is_loopback


def test_taken_port_is_named_with_its_variable_and_its_holder(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    (problem,) = ports.find_taken({"SERVE_PORT": port}, ours=[])
    assert f"port {port} is taken by process {os.getpid()}" in problem
    assert "set SERVE_PORT" in problem


def test_our_own_port_is_no_problem(listener: socket.socket) -> None:
    assert ports.find_taken({"SERVE_PORT": listener.getsockname()[1]}, ours=[os.getpid()]) == []


def test_free_port_is_no_problem(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert ports.find_taken({"SERVE_PORT": port}, ours=[]) == []


def test_port_on_all_interfaces_is_found_exposed_and_one_on_loopback_is_not(listener: socket.socket) -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        found = "\n".join(ports.find_exposed([os.getpid()]))
        assert f"port {open_to_all.getsockname()[1]} on 0.0.0.0, process {os.getpid()}" in found
        assert f"port {listener.getsockname()[1]} " not in found


def test_nobody_answers_on_a_closed_port(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert not ports.answers(f"http://127.0.0.1:{port}/health")
