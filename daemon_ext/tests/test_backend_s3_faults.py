"""S3 servers that are not there, answer slowly, by half, or say too much."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hypercache_daemon.backend import Backend, BackendError, Target

MIB = 1024 * 1024


def place(backend: Backend) -> Target:
    target = backend.upload_target("hypercache://folder/x")
    assert target is not None
    return target


def backend_at(endpoint: str, request_timeout_s: float = 5.0) -> Backend:
    options = {
        "endpoint_url": endpoint,
        "key": "AKIDEXAMPLE",
        "secret": "hush-hush",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    return Backend("s3://bucket", storage_options=options, request_timeout_s=request_timeout_s)


def upload(backend: Backend, size_bytes: int) -> None:
    backend.upload(place(backend), [b"x" * size_bytes], size_bytes)


def within(limit_s: float, call: Callable[[], object]) -> BackendError:
    began = time.monotonic()
    with pytest.raises(BackendError) as failed:
        call()
    assert time.monotonic() - began < limit_s
    return failed.value


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """An endpoint whose connections are handled by `answer`, one after the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept_all() -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                connection, _ = listener.accept()
                accepted.append(connection)
                with connection, contextlib.suppress(OSError):  # the client gave up
                    answer(connection)

    thread = threading.Thread(target=accept_all)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for stuck in (listener, *accepted):  # the client keeps its connections for later
            with contextlib.suppress(OSError):
                stuck.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def test_a_server_that_drips_one_byte_after_the_other_is_given_up_in_time() -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Drip: ")
        connection.settimeout(0.1)
        while True:
            with contextlib.suppress(TimeoutError):
                connection.recv(65536)
            connection.sendall(b"x")

    with serving(drip) as endpoint:
        backend = backend_at(endpoint, request_timeout_s=1.0)
        assert "no answer within 1 s" in str(within(10.0, lambda: backend.size_bytes(place(backend))))


def test_a_reply_that_ends_early_is_an_error() -> None:
    def half(connection: socket.socket) -> None:
        while head := connection.recv(65536):
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 10\r\n\r\n')
            if not head.startswith(b"HEAD"):
                connection.sendall(b"12345")
                return

    with serving(half) as endpoint:
        backend = backend_at(endpoint)
        size_bytes, pieces = backend.download(place(backend))
        assert size_bytes == 10
        assert "cannot download s3://bucket/folder/x" in str(within(20.0, lambda: list(pieces)))


def test_an_upload_that_the_server_does_not_confirm_in_full_is_an_error() -> None:
    def forget(connection: socket.socket) -> None:
        while head := connection.recv(65536):
            length = b"7" if head.startswith(b"HEAD") else b"0"
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: ' + length + b"\r\n\r\n")

    with serving(forget) as endpoint:
        backend = backend_at(endpoint)
        words = str(within(20.0, lambda: upload(backend, 0)))
    assert "the store has 7 bytes of it afterwards, not 0" in words


def test_no_secret_gets_into_an_error_even_where_the_server_repeats_it() -> None:
    body = (
        b"<Error><Code>Oops</Code><Message>AKIDEXAMPLE hush-hush "
        b"http://user:hush@host/x is not known</Message></Error>"
    )

    def tell(connection: socket.socket) -> None:
        while head := connection.recv(65536):
            answer = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(answer if head.startswith(b"HEAD") else answer + body)

    with serving(tell) as endpoint:
        backend = backend_at(endpoint)
        words = str(within(20.0, lambda: upload(backend, 0)))
    assert "*** *** http://host/x is not known" in words
    assert "hush" not in repr(place(backend))


def test_a_server_that_is_not_there_is_an_error_that_names_target_and_endpoint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    backend = backend_at(endpoint)
    for call in (
        lambda: backend.size_bytes(place(backend)),
        lambda: backend.download(place(backend)),
        lambda: upload(backend, 1),
        lambda: upload(backend, 33 * MIB),
    ):
        words = str(within(10.0, call))
        assert "s3://bucket/folder/x: " in words
        assert endpoint in words
