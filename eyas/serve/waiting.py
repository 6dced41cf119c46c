"""Answers 503 to whoever comes while the model is fetched and loaded, on the socket that the server
then takes over.

A platform that takes a port nobody listens on for a dead container (Vertex AI after 40 seconds)
sees one that is not ready yet. One connection at a time, a second each for its head and for its
answer: nothing here can be held up or filled. Knows sockets, no application.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0  # with a client that sends no request, or takes no answer
_LOOKS_EVERY_S = 0.1
_MOST_HEAD_BYTES = 1 << 16
_BODY = json.dumps({"status": "loading"}).encode()
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: "
    b"5\r\nconnection: close\r\n"
    b"content-length: " + str(len(_BODY)).encode() + b"\r\n\r\n" + _BODY
)


@contextmanager
def answering(listener: socket.socket) -> Iterator[None]:
    """Answer on a bound socket from here to the end of the block; it goes on listening, and who
    came last waits.
    """
    listener.listen(128)
    listener.setblocking(False)
    is_over = threading.Event()
    thread = threading.Thread(target=_serve, args=(listener, is_over), name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _serve(listener: socket.socket, is_over: threading.Event) -> None:
    while not is_over.is_set():
        if not select.select([listener], [], [], _LOOKS_EVERY_S)[0]:
            continue
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                _answer(connection)


def _answer(connection: socket.socket) -> None:
    """Read the head of a request, then answer: one that is answered unread may see the connection
    break instead.
    """
    until = time.monotonic() + PATIENCE_S
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _MOST_HEAD_BYTES:
        # of all pieces together: a byte at a time holds nobody up
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        piece = connection.recv(4096)
        if not piece:
            return
        head += piece
    connection.settimeout(PATIENCE_S)
    connection.sendall(_ANSWER)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(4096)
