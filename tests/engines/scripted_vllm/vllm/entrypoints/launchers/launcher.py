import socket
from typing import Any


def create_server_socket(address: Any, *, reuse_port: bool) -> socket.socket:
    raise AssertionError(f"the parent's socket is meant, not {address}, {reuse_port}")
