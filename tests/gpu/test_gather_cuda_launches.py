"""How the CUDA gathers are launched: streams, graphs, threads, devices; where kernels come from; the debug mode."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import compile_fatbin
from tests.support.on_gpu import check, gpu_bytes, some_bad, untouched, without_bad_slots
from tests.support.paged import (
    POISON,
    Call,
    Scales,
    bits,
    copied,
    forget_plans,
    make_classic,
    make_pair,
    memory,
    mismatch,
    random_slots,
    run,
    seeded,
    slots_call,
    table_call,
)
from vllm_kda_plugin.kernels import gather, loader
from vllm_kda_plugin.kernels.gather import gather_cached_kv

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "gather_cached_kv"
REQUESTS = [(0, 1), (3, 0), (7, 250), (16, 64), (0, 0), (129, 33), (1, 1), (5, 0)]
STARTS, LENS = zip(*REQUESTS, strict=True)


# ---- Streams, graphs, threads, devices ------------------------------------------------------------------------------


def calls() -> list[Call]:
    """One of every kind of kernel that is launched."""
    caches = make_pair("apart", "LBNHC", 50, 16, 4, 64, torch.bfloat16, seeded())
    slots = random_slots(300, 800, torch.int64, seeded())
    fp8 = make_pair("apart", "LBNHC", 50, 16, 4, 64, torch.float8_e4m3fn, seeded())
    assert caches[1] is not None
    assert fp8[1] is not None
    return [
        table_call(*make_pair("packed", "LBNHC", 50, 16, 4, 64, torch.bfloat16, seeded()), STARTS, LENS, seeded()),
        table_call(*make_pair("unlike", "padded", 50, 5, 3, 7, torch.float32, seeded()), STARTS, LENS, seeded()),
        slots_call(caches[0], caches[1], slots),
        slots_call(*make_classic("dense", 50, 16, 4, 64, torch.bfloat16, seeded()), slots),
        slots_call(*make_classic("off by one", 50, 16, 4, 64, torch.bfloat16, seeded()), slots),
        slots_call(fp8[0], fp8[1], slots, dtype=torch.half),
    ]


def test_either_origin_of_the_kernels(origin: str) -> None:
    for call in calls():
        check(call)
    assert loader.load(KERNEL, torch.cuda.current_device()).status.state == origin


def test_calls_in_any_order() -> None:
    """Each is told from the one before it."""
    moved = [copied(call, "cuda") for call in calls()]
    wanted = calls()
    for call in wanted:
        run(call, impl="torch")
    for index in torch.randint(0, len(moved), (300,), generator=seeded()).tolist():
        for name in ("key", "value"):
            if moved[index][name] is not None:
                memory(moved[index][name]).fill_(POISON)
        run(moved[index])
        assert not mismatch(moved[index], wanted[index], "key", "value")


def test_host_does_not_wait_for_the_gpu() -> None:
    moved = [copied(call, "cuda") for call in calls()]
    loader.load(KERNEL, torch.cuda.current_device())
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for call in moved:
            run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_current_stream() -> None:
    for call in calls():
        moved, other = copied(call, "cuda"), copied(call, "cuda")
        later = [memory(moved[name]) for name in ("key_cache", "value_cache") if moved[name] is not None]
        early = [memory(other[name]) for name in ("key_cache", "value_cache") if other[name] is not None]
        for cache in early:
            cache.bitwise_not_()
        run(call, impl="torch")
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # some 30 ms: a launch on another stream would read the cache as it was
            for cache, right in zip(early, later, strict=True):
                cache.copy_(right)
            run(other)
        stream.synchronize()
        assert not mismatch(other, call, "key", "value")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(64, 1), (4096, 8), (30_000, 8)])
def test_a_gather_sees_what_the_one_before_wrote_and_is_seen_by_the_next_kernel(
    num_tokens: int, num_heads: int, graph: bool
) -> None:
    buffers = [gpu_bytes(2, num_tokens // 8, 8, num_heads, 64) for _ in range(2)]
    start = buffers[0].clone()
    slots = torch.randperm(num_tokens // 8 * 8, device="cuda")
    lap = torch.zeros(num_heads, 64, dtype=torch.int16, device="cuda")

    def chain() -> None:
        for step in range(20):
            source, target = buffers[step % 2], buffers[1 - step % 2]
            key, value = target.view(2, -1, num_heads, 64)
            gather_cached_kv(key, value, source[0], source[1], slots)
            if step % 5 == 4:
                bits(target).add_(1)
                lap.add_(bits(key)[0])

    chain()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            chain()
    buffers[0].copy_(start)
    lap.zero_()
    if graph:
        captured.replay()
    else:
        chain()
    want = bits(start).view(2, -1, num_heads, 64)
    want_lap = torch.zeros_like(lap)
    for step in range(20):
        want = want[:, slots]
        if step % 5 == 4:
            want = want + 1
            want_lap += want[0, 0]
    assert torch.equal(bits(buffers[0]).view(want.shape), want)
    assert torch.equal(lap, want_lap)


WRITE_LATE = r"""
extern "C" __global__ void write_late(int* to, const int* from, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (const long long begin = clock64(); clock64() - begin < 200000;) {}  // 0.1 ms
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}"""


def test_a_gather_waits_for_a_kernel_that_lets_it_come_early() -> None:
    """What it is told, and what it copies, is written last by the kernel before it."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs Hopper or later")
    import cupy

    write = cupy.RawKernel(WRITE_LATE, "write_late")
    for call in calls():
        wanted = copied(call)
        run(wanted, impl="torch")
        moved = copied(call, "cuda")
        run(moved)  # loads the kernel, and remembers the call
        for name, tensor in moved.items():
            if not isinstance(tensor, torch.Tensor) or name in ("key", "value", "k_scale", "v_scale"):
                continue
            words = memory(tensor)
            words = words[: len(words) // 4 * 4].view(torch.int32)
            right = words.clone()
            for out in ("key", "value"):
                if moved[out] is not None:
                    memory(moved[out]).fill_(POISON)
            words.zero_()
            torch.cuda.synchronize()
            with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
                write((1,), (256,), (words.data_ptr(), right.data_ptr(), cupy.int32(len(words))))
            run(moved)
            torch.cuda.synchronize()
            assert not mismatch(moved, wanted, "key", "value"), name


def test_table_in_a_cuda_graph_with_new_tables_at_each_replay(origin: str) -> None:
    caches = make_pair("packed", "LBNHC", 50, 16, 4, 64, torch.bfloat16, seeded())
    static = copied(table_call(*caches, [0, 0, 0], [200, 200, 200], seeded()), "cuda")
    loader.load(KERNEL, torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the kernel's very first launch
        run(static)
    for seed, (starts, lens) in enumerate([([0, 5, 9], [200, 3, 17]), ([1, 1, 1], [0, 0, 0]), ([3, 0, 0], [0, 99, 1])]):
        call = table_call(*caches, starts, lens, seeded(seed), spare_rows=len(static["key"]) - sum(lens))
        table = static["block_table"]
        table.fill_(-1)
        width = min(call["block_table"].shape[1], table.shape[1])
        table[:, :width] = call["block_table"][:, :width].cuda()
        for name in ("cu_seqlens_k", "seq_starts", "key"):
            static[name].copy_(call[name])
        graph.replay()
        run(call, impl="torch")
        assert not mismatch(static, call, "key")


def test_slots_in_a_cuda_graph_with_new_slots_at_each_replay(origin: str) -> None:
    statics = [copied(call, "cuda") for call in calls() if "slot_mapping" in call]
    loader.load(KERNEL, torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for static in statics:
            run(static)
    for seed in range(3):
        again = [call for call in calls() if "slot_mapping" in call]
        for static, call in zip(statics, again, strict=True):
            call["slot_mapping"] = some_bad(random_slots(300, 800, torch.int64, seeded(seed)))
            static["slot_mapping"].copy_(call["slot_mapping"])
            for name in ("key", "value"):
                memory(static[name]).fill_(POISON)
        graph.replay()
        for static, call in zip(statics, again, strict=True):
            run(without_bad_slots(call), impl="torch")
            assert not mismatch(static, call, "key", "value")


def test_first_use_while_capturing_is_refused_with_a_reason(origin: str) -> None:
    moved = [copied(call, "cuda") for call in calls()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in moved:
            with pytest.raises(RuntimeError, match="before the capture"):
                run(call)
    for call in moved:
        run(call)


def test_threads_load_once_and_launch_each_on_its_own_stream(origin: str) -> None:
    caches = [make_pair("packed", "LBNHC", 20, 16, 2, 32, torch.float16, seeded(index)) for index in range(8)]
    batches = [table_call(*pair, [1], [150], seeded()) for pair in caches]  # all alike: one plan
    moved = [copied(batch, "cuda") for batch in batches]
    torch.cuda.synchronize()
    barrier = threading.Barrier(len(batches))
    kernels: list[loader.Kernel] = []
    errors: list[BaseException] = []

    def work(batch: Call) -> None:
        try:
            barrier.wait()
            kernels.append(loader.load(KERNEL, 0))  # before this thread has done anything else on the GPU
            for _ in range(200):
                run(batch)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run(batch)
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in moved]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert len(set(map(id, kernels))) == 1
    for batch, other in zip(batches, moved, strict=True):
        run(batch)
        assert not mismatch(other, batch, "key")


def test_launch_from_a_thread_that_never_used_the_gpu() -> None:
    batches = calls()
    moved = [copied(call, "cuda") for call in batches]
    for call in moved:
        run(call)
        for name in ("key", "value"):
            if call[name] is not None:
                memory(call[name]).fill_(POISON)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for call in moved:
                run(call)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors
    for call, other in zip(batches, moved, strict=True):
        run(call, impl="torch")
        assert not mismatch(other, call, "key", "value")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current(origin: str) -> None:
    for call in calls():
        moved = copied(call, "cuda:1")
        with torch.cuda.device(0):
            run(moved)
            assert torch.cuda.current_device() == 0
        run(call)
        assert not mismatch(moved, call, "key", "value")


def test_fatbin_for_other_gpus_falls_back_to_the_source(
    fatbins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loaded: None
) -> None:
    source = tmp_path / "empty.cu"
    source.write_text('extern "C" __global__ void empty() {}\n')
    other = "80" if torch.cuda.get_device_capability()[0] != 8 else "90a"
    compile_fatbin(source, tmp_path / f"{KERNEL}.fatbin", other)
    monkeypatch.setattr(loader, "FATBINS", tmp_path)
    status = next(status for status in loader.kernel_status() if status.name == KERNEL)
    assert status.state == "runtime"
    assert "does not load on this GPU" in status.detail
    check(calls()[0])


def test_status_names_where_the_kernel_came_from(origin: str) -> None:
    status = next(status for status in loader.kernel_status() if status.name == KERNEL)
    assert status in loader.kernel_status()
    assert (status.name, status.state) == (KERNEL, origin)


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["value", "key_cache", "value_cache", "block_table", "cu_seqlens_k", "seq_starts"])
def test_argument_of_a_table_on_another_device_is_named(name: str) -> None:
    call = table_call(*make_pair("apart", "LBNHC", 5, 4, 2, 8, torch.float32, seeded()), [0], [9], seeded())
    moved = copied(call, "cuda")
    with pytest.raises(ValueError, match=rf"^{name} is on cpu, must be .*cuda:0"):
        run(moved | {name: call[name]})
    assert untouched(moved["key"])


@pytest.mark.parametrize("name", ["value", "value_cache", "slot_mapping", "k_scale", "v_scale"])
def test_argument_of_slots_on_another_device_is_named(name: str) -> None:
    fp8 = make_pair("apart", "LBNHC", 5, 4, 2, 8, torch.float8_e5m2, seeded())
    assert fp8[1] is not None
    scales: Scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    call = slots_call(fp8[0], fp8[1], torch.tensor([3, 1]), dtype=torch.half, scales=scales)
    moved = copied(call, "cuda")
    with pytest.raises(ValueError, match=rf"^{name} is on cpu, must be .*cuda:0"):
        run(moved | {name: call[name]})
    assert untouched(moved["key"])


def wrong_calls() -> list[tuple[Call, str]]:
    """Indices that do not fit, on the GPU, and what the debug mode says."""
    caches = make_pair("apart", "LBNHC", 5, 4, 2, 8, torch.float32, seeded())
    assert caches[1] is not None
    table = table_call(*caches, [0, 2], [5, 6], seeded())
    slots = slots_call(caches[0], caches[1], torch.tensor([3, -1, 19, 0]))
    classic = slots_call(*make_classic("dense", 5, 8, 2, 8, torch.half, seeded()), torch.tensor([3, -1, 39, 0]))
    bad_table = table["block_table"].clone()
    bad_table[1, 1] = 5
    wrong = [
        (slots | {"slot_mapping": torch.tensor([3, -1, 20, 0])}, "slot_mapping contains 20 at row 2"),
        (slots | {"slot_mapping": torch.tensor([3, -1, 1, -2]).int()}, "slot_mapping contains -2 at row 3"),
        (classic | {"slot_mapping": torch.tensor([40, -1, 1, 2]).int()}, "slot_mapping contains 40 at row 0"),
        (table | {"block_table": bad_table}, r"block_table names block 5 for row 7 of the output \(request 1\)"),
        (table | {"block_table": table["block_table"][:, :1]}, "block_table is 1 blocks of 4 tokens wide"),
        (table | {"cu_seqlens_k": torch.tensor([1, 5, 11]).int()}, "cu_seqlens_k starts with 1"),
        (table | {"cu_seqlens_k": torch.tensor([0, 5, 4]).int()}, "cu_seqlens_k falls from 5 to 4 at request 1"),
        (table | {"cu_seqlens_k": torch.tensor([0, 5, 99]).int()}, "key has 16 rows"),
        (table | {"seq_starts": torch.tensor([0, -3]).int()}, "seq_starts contains -3"),
    ]
    return [(copied(call, "cuda"), message) for call, message in wrong]


@pytest.fixture
def start_checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Turns the debug mode on, as if it had been from the start of the process."""

    def start() -> None:
        monkeypatch.setattr(gather, "_CHECK", True)
        forget_plans()

    yield start
    forget_plans()


def test_debug_mode_names_what_is_wrong(start_checking: Callable[[], None]) -> None:
    start_checking()
    for call, message in wrong_calls():
        with pytest.raises(ValueError, match=f"^{message}"):
            run(call)
        assert untouched(call["key"])
        assert untouched(call["value"])
    for call in calls():
        check(call)


def test_debug_mode_looks_at_nothing_while_a_graph_is_captured(start_checking: Callable[[], None]) -> None:
    wrong = [call for call, _ in wrong_calls()]
    plain = [copied(call, "cuda") for call in wrong]
    for call in plain:
        run(call)  # without the debug mode: harmless
    start_checking()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in wrong:
            run(call)
    assert all(untouched(call["key"]) for call in wrong)
    graph.replay()
    for call, other in zip(wrong, plain, strict=True):
        assert not mismatch(call, other, "key", "value")


def test_debug_mode_from_the_environment() -> None:
    code = (
        "import torch\n"
        "from vllm_kda_plugin.kernels.gather import gather_cached_kv\n"
        "cache, out = torch.zeros(3, 4, 2, 8, device='cuda'), torch.zeros(1, 2, 8, device='cuda')\n"
        "gather_cached_kv(out, out, cache, cache, torch.tensor([12], device='cuda'))\n"
    )
    for value, said in (("0", ""), ("1", "slot_mapping contains 12 at row 0, must be from 0 to 11")):
        env = {**os.environ, "VLLM_KDA_CHECK": value}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == bool(said), done.stderr
        assert said in done.stderr
