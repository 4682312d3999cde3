"""What listens like a daemon and gives each line the same treatment: for faults that no relay can make."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stub_daemon(path: str, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """A socket at `path`; `answer` is called for each line that a client sends, with its connection.

    A client that goes away ends its connection; anything else that `answer` raises is raised at the end.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(128)
        stub = _Stub(listener, answer)
        try:
            yield
        finally:
            stub.close()


class _Stub:
    def __init__(self, listener: socket.socket, answer: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._answer = answer
        self._threads: list[threading.Thread] = []
        self._failures: list[Exception] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _accept(self) -> None:
        with suppress(OSError):  # `close` ended the listening
            while True:
                peer, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
                self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, peer.makefile("rb") as lines:
                for _ in lines:
                    self._answer(peer)
        except OSError:  # the client is gone
            return
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `close` raises it
            self._failures.append(error)
