"""The CUDA gather of paged KV, bit for bit against the CPU's, on fresh random bytes and poisoned outputs."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import build_fatbins
from tests.support.paged import DTYPES, LAYOUTS, Batch, make_batch, make_cache, poisoned, random_bytes, same_bytes
from vllm_kda_plugin.kernels import loader
from vllm_kda_plugin.kernels.gather import gather_paged_kv

pytestmark = pytest.mark.gpu

SHAPES = [(8, 16, 256), (1, 1, 2), (3, 5, 14), (1, 528, 128), (40, 8, 256), (2, 64, 1024)]
REQUESTS = [(0, 1), (3, 0), (7, 250), (16, 64), (0, 0), (129, 33), (1, 1), (5, 0)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(batch: Batch) -> None:
    gather_paged_kv(batch.kv_cache, batch.block_table, batch.cu_seqlens_k, batch.seq_starts, batch.out)


def move(tensor: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """To the GPU with strides, gaps and misalignment kept (Tensor.to would make it dense)."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def on_gpu(batch: Batch, device: str = "cuda") -> Batch:
    return Batch(**{field.name: move(getattr(batch, field.name), device) for field in dataclasses.fields(batch)})


def check(batch: Batch) -> None:
    """Gather on the CPU and on the GPU, and compare."""
    moved = on_gpu(batch)
    run(batch)
    run(moved)
    assert same_bytes(moved.out.cpu(), batch.out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_dtype_and_shape(layout: str, dtype: torch.dtype, origin: str) -> None:
    for num_heads, block_size, width in SHAPES:
        cache = make_cache(layout, 13, num_heads, block_size, width, dtype, seeded())
        check(make_batch(cache, [start for start, _ in REQUESTS], [length for _, length in REQUESTS], seeded()))
    assert loader.load("gather_paged_kv", torch.cuda.current_device()).status.state == origin


@pytest.mark.parametrize("seed", range(50))
def test_random_batches(seed: int) -> None:
    generator = seeded(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    layout, dtype = LAYOUTS[seed % len(LAYOUTS)], DTYPES[seed % len(DTYPES)]
    cache = make_cache(layout, pick(1, 40), pick(1, 9), pick(1, 70), 2 * pick(1, 130), dtype, generator)
    num_reqs = pick(1, 300)
    starts, lens = ([pick(0, 90) for _ in range(num_reqs)] for _ in range(2))
    check(make_batch(cache, starts, lens, generator, spare_rows=pick(0, 2000)))


@pytest.mark.parametrize(("num_reqs", "length"), [(4096, 17), (1, 70_001), (3000, 1), (1000, 0)])
def test_many_short_requests_and_one_long_one(num_reqs: int, length: int) -> None:
    cache = make_cache("LBNHC", 997, 2, 16, 128, torch.bfloat16, seeded())
    check(make_batch(cache, [i % 31 for i in range(num_reqs)], [length] * num_reqs, seeded()))


def test_no_request_and_no_row() -> None:
    cache = make_cache("LBNHC", 3, 2, 16, 128, torch.bfloat16, seeded())
    check(make_batch(cache, [], [], seeded()))
    check(make_batch(cache, [0], [0], seeded(), spare_rows=0))


def test_blocks_outside_the_cache_are_not_read() -> None:
    cache = make_cache("LBNHC", 4, 2, 16, 128, torch.bfloat16, seeded())
    batch = on_gpu(make_batch(cache, [0, 0, 0], [48, 48, 48], seeded()))
    clean = batch.block_table.clone()
    run(batch)
    good = batch.out.clone()
    for bad in (-1, 4, 2**31 - 1, -(2**31)):
        batch.block_table.copy_(clean)
        batch.block_table[1, 1] = bad
        batch.out.copy_(poisoned(good.shape, good.dtype))
        run(batch)
        untouched = slice(48 + 16, 48 + 32)
        assert same_bytes(batch.out[untouched].cpu(), poisoned((16, 2, 128), good.dtype))
        batch.out[untouched] = good[untouched]
        assert same_bytes(batch.out, good)


def test_lengths_past_the_table_or_out_write_nothing_else() -> None:
    cache = make_cache("LBNHC", 4, 2, 16, 128, torch.bfloat16, seeded())
    batch = on_gpu(make_batch(cache, [0], [64], seeded(), spare_rows=64))
    run(batch)
    good = batch.out.clone()
    batch.block_table[:, 4:] = 0
    wide = dataclasses.replace(batch, block_table=batch.block_table[:, :2], out=poisoned(good.shape, good.dtype).cuda())
    run(wide)  # the table ends after 32 tokens
    assert same_bytes(wide.out[:32], good[:32])
    assert same_bytes(wide.out[32:].cpu(), poisoned((96, 2, 128), good.dtype))
    whole = poisoned(good.shape, good.dtype).cuda()
    run(dataclasses.replace(batch, out=whole[:40]))  # 64 tokens for 40 rows
    assert same_bytes(whole[:40], good[:40])
    assert same_bytes(whole[40:].cpu(), poisoned((88, 2, 128), good.dtype))
    for cu_seqlens in ([0, -5], [0, 2**31 - 1], [7, 3], [-(2**31), 2**31 - 1]):  # nonsense must be harmless
        run(dataclasses.replace(batch, cu_seqlens_k=torch.tensor(cu_seqlens, dtype=torch.int32, device="cuda")))
    torch.cuda.synchronize()


def gpu_bytes(*shape: int) -> torch.Tensor:
    """Random bf16 bits made on the GPU."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda").view(torch.bfloat16)


def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    num_heads, block_size, width = 8, 16, 256
    num_blocks = 2**31 // (num_heads * block_size * width) + 1000
    pages = gpu_bytes(num_blocks, block_size, num_heads, width)
    assert pages.numel() > 2**31
    order = torch.randperm(num_blocks, device="cuda")
    out = torch.zeros(num_blocks * block_size + 3, num_heads, width, dtype=torch.bfloat16, device="cuda")
    cu_seqlens = torch.tensor([0, num_blocks * block_size], dtype=torch.int32, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    gather_paged_kv(pages.transpose(1, 2), order.int()[None], cu_seqlens, zero, out)
    copied = out[:-3].view(torch.int16).view(num_blocks, block_size, num_heads, width)
    for first in range(0, num_blocks, 4096):
        part = slice(first, first + 4096)
        assert torch.equal(copied[part], pages.view(torch.int16)[order[part]])
    assert int(out[-3:].count_nonzero()) == 0


def test_pages_of_all_layers_together_above_4_gib() -> None:
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    pages = gpu_bytes(40, 32, 16, 8, 16, 1024)  # blocks, layers, ...: 5.4 GB
    cache = pages.view(40, 32, 16 * 8, 16, 1024)[:, 31, :8]
    assert cache.stride(0) * 39 > 2**31
    table = torch.tensor([[39, 0, 38, 17]], dtype=torch.int32, device="cuda")
    out = torch.zeros(60, 8, 1024, dtype=torch.bfloat16, device="cuda")
    gather_paged_kv(cache, table, torch.tensor([0, 60]).int().cuda(), torch.tensor([2]).int().cuda(), out)
    want = cache[table[0].long()].transpose(1, 2).reshape(64, 8, 1024)[2:62]
    assert same_bytes(out, want.contiguous())


def test_runs_on_the_current_stream() -> None:
    cache = random_bytes((64, 16, 2, 128), torch.bfloat16, seeded()).cuda().transpose(1, 2)
    later = random_bytes((64, 16, 2, 128), torch.bfloat16, seeded(1)).cuda().transpose(1, 2)
    batch = on_gpu(make_batch(cache.cpu(), [0], [64 * 16], seeded(), spare_rows=0))
    batch.kv_cache = later.clone()
    run(batch)
    want = batch.out.clone()
    batch.kv_cache = cache
    batch.out.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a launch on another stream would read the old cache
        cache.copy_(later)
        run(batch)
    stream.synchronize()
    assert same_bytes(batch.out, want)


def test_in_a_cuda_graph_with_new_tables_at_each_replay(origin: str) -> None:
    cache = make_cache("LBNHC", 50, 4, 16, 128, torch.bfloat16, seeded())
    static = on_gpu(make_batch(cache, [0, 0, 0], [200, 200, 200], seeded()))
    loader.load("gather_paged_kv", torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the kernel's very first launch
        run(static)
    for seed, (starts, lens) in enumerate([([0, 5, 9], [200, 3, 17]), ([1, 1, 1], [0, 0, 0]), ([3, 0, 0], [0, 99, 1])]):
        batch = make_batch(cache, starts, lens, seeded(seed), spare_rows=len(static.out) - sum(lens))
        static.block_table.fill_(-1)
        width = min(batch.block_table.shape[1], static.block_table.shape[1])
        static.block_table[:, :width] = batch.block_table[:, :width].cuda()
        static.cu_seqlens_k.copy_(batch.cu_seqlens_k)
        static.seq_starts.copy_(batch.seq_starts)
        static.out.copy_(batch.out)
        graph.replay()
        run(batch)
        assert same_bytes(static.out.cpu(), batch.out)


def test_first_use_while_capturing_is_refused_with_a_reason(origin: str) -> None:
    batch = on_gpu(make_batch(make_cache("LBNHC", 5, 1, 4, 8, torch.float32, seeded()), [0], [9], seeded()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before the capture"):
        run(batch)
    run(batch)


def test_threads_load_once_and_launch_each_on_its_own_stream(origin: str) -> None:
    caches = [make_cache("LBNHC", 20, 2, 16, 64, torch.float16, seeded(index)) for index in range(8)]
    batches = [make_batch(cache, [1], [150], seeded()) for cache in caches]
    moved = [on_gpu(batch) for batch in batches]
    torch.cuda.synchronize()
    barrier = threading.Barrier(len(batches))
    kernels: list[loader.Kernel] = []
    errors: list[BaseException] = []

    def work(batch: Batch) -> None:
        try:
            barrier.wait()
            kernels.append(loader.load("gather_paged_kv", 0))  # before this thread has done anything else on the GPU
            for _ in range(20):
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
        assert same_bytes(other.out.cpu(), batch.out)


def test_launch_from_a_thread_that_never_used_the_gpu() -> None:
    batch = make_batch(make_cache("LBNHC", 5, 1, 4, 8, torch.float32, seeded()), [0], [9], seeded())
    moved = on_gpu(batch)
    run(moved)
    moved.out.copy_(batch.out)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run(moved)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    run(batch)
    assert same_bytes(moved.out.cpu(), batch.out)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current(origin: str) -> None:
    batch = make_batch(make_cache("LBNHC", 5, 2, 4, 8, torch.float32, seeded()), [0], [9], seeded())
    moved = on_gpu(batch, "cuda:1")
    with torch.cuda.device(0):
        run(moved)
        assert torch.cuda.current_device() == 0
    run(batch)
    assert same_bytes(moved.out.cpu(), batch.out)


def test_fatbin_for_other_gpus_falls_back_to_the_source(
    fatbins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "80" if torch.cuda.get_device_capability()[0] != 8 else "90a"
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "FATBINS", build_fatbins(tmp_path, other))
    [status] = loader.kernel_status()
    assert status.state == "runtime"
    assert "does not load on this GPU" in status.detail
    check(make_batch(make_cache("LBNHC", 5, 2, 4, 8, torch.float32, seeded()), [0], [9], seeded()))


def test_status_names_where_the_kernel_came_from(origin: str) -> None:
    [status] = loader.kernel_status()
    assert status == loader.kernel_status()[0]
    assert (status.name, status.state) == ("gather_paged_kv", origin)


@pytest.mark.parametrize("name", ["block_table", "cu_seqlens_k", "seq_starts", "out"])
def test_argument_on_another_device_is_named(name: str) -> None:
    cpu = make_batch(make_cache("LBNHC", 5, 2, 4, 8, torch.float32, seeded()), [0], [9], seeded())
    batch = on_gpu(cpu)
    with pytest.raises(ValueError, match=rf"^{name} .* on cpu, must be .*cuda:0"):
        run(dataclasses.replace(batch, **{name: getattr(cpu, name)}))
