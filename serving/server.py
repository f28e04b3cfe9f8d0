"""`pagedjax serve`: the application on waitress, from the start to a shutdown that lets answers end."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from waitress.server import MultiSocketServer, create_server

from pagedjax.serving.app import Limits, create_app
from pagedjax.serving.backend import Backend

logger = logging.getLogger(__name__)

SPARE_THREADS = 8
"""For what is quick, such as /health, while all answers that are allowed are in the making."""
OUTPUT_BYTES = 2**20
"""Of one answer that wait for a slow reader; then its thread waits too, and the engine's outputs do not pile up."""


class Server:
    """An HTTP server in threads of its own."""

    def __init__(self, backend: Backend, limits: Limits, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Listens from now on; port 0 takes a free one. OSError if the address is taken."""
        self.backend = backend
        self._server: Any = create_server(
            create_app(backend, limits),
            host=host,
            port=port,
            threads=limits.max_calls + limits.max_watchers + SPARE_THREADS,
            connection_limit=4 * limits.max_calls + 100,
            backlog=1024,
            channel_request_lookahead=1,  # goes on reading during a request, and so sees that the client has gone
            asyncore_use_poll=True,  # select() ends at 1,024 sockets
            outbuf_high_watermark=OUTPUT_BYTES,
            # A little more than the application takes, which refuses it in JSON; beyond, waitress does in plain text.
            max_request_body_size=4 * limits.max_body_bytes,
            ident="pagedjax",
        )
        self._thread = threading.Thread(target=self._server.run, name="http", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        if isinstance(self._server, MultiSocketServer):
            host, port = self._server.effective_listen[0]
        else:
            host, port = self._server.effective_host, self._server.effective_port
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Starts the engine's thread and answers requests."""
        self.backend.loop.start()
        self._thread.start()

    def stop(self, drain_s: float = 0.0) -> bool:
        """Lets pending answers end for at most `drain_s` seconds while new ones are refused, then closes everything.
        Whether all ended."""
        loop = self.backend.loop
        ended = loop.drain(drain_s)
        loop.stop()
        self._server.task_dispatcher.shutdown(cancel_pending=True, timeout=5.0)  # answers are written by then
        time.sleep(0.1)  # for waitress to send what is written
        self._server.close()
        self._thread.join(5.0)
        return ended


def serve(server: Server, *, drain_s: float, on_ready: Callable[[str], None]) -> int:
    """Runs a server until SIGINT or SIGTERM, which drain it; a second one ends it at once. Returns the exit status."""
    stopping = threading.Event()

    def stop(*_: object) -> None:
        if stopping.is_set():
            logger.warning("stopped at once")
            sys.exit(1)
        stopping.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        on_ready(server.url)
        while not stopping.wait(0.5):  # also when the engine is dead: /health says so to whoever restarts servers
            pass
        logger.warning("shutting down; requests pending: %d", server.backend.loop.num_pending)
        return 0 if server.stop(drain_s) and not server.backend.loop.has_failed else 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
