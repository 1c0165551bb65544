"""Runs ``vllm serve`` as a child process on this machine's loopback, for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from vllm_kda_plugin.attention.stats import parse_line

# Models come from disk, and a server started for a demo or a test reports no usage. The caller's env wins.
_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Without this vLLM kills its engine at once when it is told to end, and the engine's last log lines are lost.
_SHUTDOWN = ["--shutdown-timeout", "10"]
# Longer than vLLM's own shutdown takes; what is left then is killed.
STOP_TIMEOUT_S = 30.0
# An engine that outlives its API server is not waited for that long.
ORPHAN_TIMEOUT_S = 3.0
REPEAT_S = 2.0
TAIL_LINES = 30
# What a library in the server prints whenever a process ends; it would push the error out of the tail.
_NOISE = ("nanobind: ", "See https://nanobind", " - leaked ", " - ... skipped")


class ServerError(RuntimeError):
    """The server did not start, or ended by itself; the message holds its last log lines."""


class Server:
    """One ``vllm serve`` process and its engine processes; ``with`` starts it and ends it.

    Args:
        model: what ``vllm serve`` takes: a folder or a model name.
        log: file that receives the output of all of the server's processes.
        args: further ``vllm serve`` arguments, without host and port.
        env: variables on top of this process's own.
        timeout_s: seconds from start to the first good answer of ``/health``.
        on_wait: called about twice a second while waiting, with the seconds passed so far.

    Entering raises :class:`ServerError` if vLLM is missing, or if the server ends or stays silent for
    ``timeout_s``; no process is left then.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        log: pathlib.Path,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.model = os.fspath(model)
        self.log = log
        self.args = list(args)
        self.env = dict(env or {})
        self.timeout_s = timeout_s
        self.on_wait = on_wait
        self.port = 0
        self.was_killed = False
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT``, without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also the id of its process group; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """The API server's exit code, negative for a signal; None while it runs."""
        return self._process.poll() if self._process else None

    def log_text(self) -> str:
        """All that the server's processes have printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last ``lines`` lines of the log that say something."""
        told = [line for line in self.log_text().splitlines() if line.strip() and not line.startswith(_NOISE)]
        return "\n".join(told[-lines:])

    def stats(self) -> list[dict[str, Any]]:
        """Last counters logged by each engine process that did attention (see ``attention.stats``)."""
        last: dict[int, dict[str, Any]] = {}
        for line in self.log_text().splitlines():
            with contextlib.suppress(ValueError):  # Processes share the log; a line may be cut by another's.
                if counters := parse_line(line):
                    last[counters["pid"]] = counters
        return list(last.values())

    def group(self) -> list[int]:
        """Ids of the processes of the server's group that still run."""
        import psutil  # type: ignore[import-untyped, unused-ignore]

        running = []
        for process in psutil.process_iter(["status"]):
            try:
                in_group = os.getpgid(process.pid) == self.pid
            except ProcessLookupError:
                continue
            if in_group and process.info["status"] != psutil.STATUS_ZOMBIE:
                running.append(process.pid)
        return running

    def get(self, path: str, timeout_s: float = 10.0) -> str:
        """Body of ``GET path``; raises OSError if the server is unreachable or does not answer 200."""
        # Loopback never goes through a proxy, whatever http_proxy says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.base_url + path, timeout=timeout_s) as answer:
            return answer.read().decode()

    def __enter__(self) -> Self:
        if importlib.util.find_spec("vllm") is None:
            raise ServerError("vLLM is not installed for this Python; `vllm-kda doctor` says what to install.")
        self.port = _free_port()
        # -P: a folder called vllm in the current directory is not what is to be run.
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *_SHUTDOWN, *self.args]
        try:
            # An exception out of Popen would lose the process that it had just made.
            with self.log.open("wb") as output, interrupts_deferred():
                # A session of its own: a terminal's Ctrl-C reaches us alone, and we end the server in order.
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **_ENV, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL to its whole group for whatever is left. Safe to repeat."""
        if self._process is None:
            return
        now = time.monotonic()
        deadline, signal_at = now + STOP_TIMEOUT_S, now
        try:
            while self.group() and now < deadline:
                if self._process.poll() is not None:
                    deadline = min(deadline, now + ORPHAN_TIMEOUT_S)
                elif now >= signal_at:
                    self._process.send_signal(signal.SIGTERM)
                    # vLLM can lose one that comes while it starts its engine. Once it serves, one is enough, and
                    # another could hit the interpreter's own exit.
                    signal_at = math.inf if self._ready else now + REPEAT_S
                time.sleep(0.1)
                now = time.monotonic()
        finally:  # A second Ctrl-C during the wait must not leave processes behind.
            if self.group():
                self.was_killed = True
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _wait(self) -> None:
        """Return when ``/health`` answers; raise ServerError on an early end or after ``timeout_s``."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < self.timeout_s:
            if self.exit_code is not None:
                raise self._error(f"vllm serve ended with exit code {self.exit_code} before it was ready.")
            try:
                self.get("/health", timeout_s=2.0)
                self._ready = True
                return
            except OSError:
                time.sleep(0.5)
            if self.on_wait:
                self.on_wait(passed)
        raise self._error(f"vllm serve was not ready after {self.timeout_s:.0f} s.")

    def _error(self, message: str) -> ServerError:
        return ServerError(f"{message} Its last lines ({self.log}):\n{self.tail()}")


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP that come within the block take effect at its end."""
    if threading.current_thread() is not threading.main_thread():  # no handler ever runs in another
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in handlers:
        signal.signal(number, lambda caught, frame: came.append(caught))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in came:
            signal.raise_signal(received)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
