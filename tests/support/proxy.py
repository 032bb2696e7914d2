"""Between a client and a server: a road that can be made slow, cut, closed, or silent."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit

from typing_extensions import Self

__all__ = ("Proxy",)

_LOCALHOST = "127.0.0.1"
_PORTS = {"redis": 6379, "amqp": 5672}


class Proxy:
    """Passes TCP connections on to ``port``.  What a client sends waits for ``delay_seconds`` on its way.

    While it is ``closed``, whoever connects is counted in ``turned_away`` and hung up on.
    """

    def __init__(self, port: int, delay_seconds: float = 0.0) -> None:
        self.target = port
        self.delay_seconds = delay_seconds
        self.closed = False
        self.turned_away = 0
        self._listener = socket.create_server((_LOCALHOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @classmethod
    def to(cls, url: str) -> Self:
        """To the server at ``url``, on this machine; see :meth:`through`."""
        parts = urlsplit(url)
        return cls(parts.port or _PORTS[parts.scheme])

    def through(self, url: str) -> str:
        """The same, by way of the proxy."""
        parts = urlsplit(url)
        host, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{host}{at}{_LOCALHOST}:{self.port}").geturl()

    def cut(self) -> int:
        """Hang up on everybody; who connects again is let in.  Returns how many sockets were closed."""
        return self._hang_up()

    def stall(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flowing.clear()

    def go_on(self) -> None:
        """What was held up passes now."""
        self._flowing.set()

    def shut(self) -> None:
        """Hang up on everybody, now and until :meth:`reopen`."""
        self.closed = True
        self._hang_up()

    def reopen(self) -> None:
        self.closed = False

    def close(self) -> None:
        """The end.  Harmless twice."""
        self._listener.close()
        self._flowing.set()
        self._hang_up()

    def _hang_up(self) -> int:
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    # Wakes whoever reads from it, too; closing alone would not.
                    sock.shutdown(socket.SHUT_RDWR)
            return len(self._open)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.closed:
                self.turned_away += 1
                client.close()
                continue
            try:
                server = socket.create_connection((_LOCALHOST, self.target))
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            for source, sink, delayed in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, sink, delayed), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, delayed: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if delayed and self.delay_seconds:
                    time.sleep(self.delay_seconds)
                self._flowing.wait()
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
        source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
