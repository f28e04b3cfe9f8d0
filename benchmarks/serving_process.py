"""`pagedjax serve` as a process on a free port of the loopback, for benchmarks."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_S = 60.0


class ServerProcess:
    """A running server: where it is, and what it takes."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.url = url
        self.pid = process.pid
        self.status: int | None = None
        """Exit status; None while it runs. 0 if it ended well when it was told to."""
        self.errors: list[str] = []
        """Lines of its log that say ERROR or CRITICAL; complete when it has ended."""

    def rss_mb(self) -> float:
        """Resident memory; needs Linux."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """Seconds that all its threads have computed so far; needs Linux."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server_process(model: str, options: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A server that is ready, and told to stop at the end. RuntimeError if it does not start."""
    command = [sys.executable, "-m", "pagedjax", "serve", model, "--port", "0", "--no-progress", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    url = None
    for line in process.stderr:
        lines.append(line)
        if (match := re.search(r" at (http://\S+) \(", line)) is not None:
            url = match[1]
            break
    if url is None:
        raise RuntimeError(f"the server ended with {process.wait()}: {''.join(lines[-5:])}")
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    server = ServerProcess(process, url)
    try:
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            server.status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            server.status = process.wait()
        reader.join()
        server.errors += [line.strip() for line in lines if line.startswith(("ERROR", "CRITICAL", "Traceback"))]
        print("".join(lines[-20:]), file=sys.stderr, end="")
