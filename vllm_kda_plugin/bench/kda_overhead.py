"""``vllm-kda bench kda --overhead``: what a KDA layer's prefill pays for allocating instead of having a workspace.

Before: what a layer does that has no workspace. It gathers the states of the batch into a new tensor, allocates output,
final states and scratch, calls the kernel and puts the states back into the pool, with vLLM's own functions for it.
After: what our layer does. All of these are slices of vLLM's workspace, and every tensor is checked.
Stock: what vLLM's layer of Kimi K3 does, which has a workspace too, but for the gathered states. FlashKDA only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_kda_plugin.bench import timing
from vllm_kda_plugin.bench.kda_cases import DTYPE, HEAD_DIM, STATE_DTYPE, Case, Inputs, draw
from vllm_kda_plugin.bench.timing import Call
from vllm_kda_plugin.kda import providers
from vllm_kda_plugin.kda.prefill import kda_prefill
from vllm_kda_plugin.kda.providers import PROVIDERS, Provider
from vllm_kda_plugin.kda.workspace import KdaWorkspace
from vllm_kda_plugin.kernels import kda_native

TOKENS = (1, 32, 64, 128, 256, 512, 1024, 2048)
HEADS = 12
MOST_SEQUENCES = 8
_POOL_ROWS = 32


def measure_all(device: torch.device) -> dict[str, Any]:
    """Measure and print, provider by provider; returns what --json writes.

    Raises:
        ImportError: vLLM, whose workspace is used, is not there.
    """
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    if device.type == "cpu":
        torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does: there is no accelerator
    if not is_workspace_manager_initialized():
        init_workspace_manager(device)
    report: dict[str, Any] = timing.describe(device)
    timing.tell(report)
    print(
        f"{HEADS} heads of {HEAD_DIM}, bounded gate, up to {MOST_SEQUENCES} sequences. Timed is one call, host and "
        "device together: the device has nothing to do before it, and the time ends when it has done everything."
    )
    rows: list[dict[str, Any]] = []
    for name in sorted(PROVIDERS, key=lambda name: name == "triton"):  # last: it tunes itself, for minutes
        provider = PROVIDERS[name]
        reason = provider.why_not(_case(1).layer(device))
        if reason is not None:
            print(f"\n{name} is left out: {reason}")
            continue
        has_stock = "stock" in make_ways(provider, TOKENS[0], device)
        print(f"\n{name}\ntokens  before (ms)  after (ms)   speedup" + "  stock (ms)" * has_stock)
        for tokens in TOKENS:
            row = measure(provider, tokens, device)
            rows.append(row)
            line = f"{tokens:6}  {row['before_ms']:11.4f}  {row['after_ms']:10.4f}  {row['speedup']:7.2f}x"
            print(line + (f"  {row['stock_ms']:10.4f}" if has_stock else ""), flush=True)
        for row in rows:
            if row["provider"] == name and "host_us" in row:
                told = ", ".join(f"{way} {us:.1f}" for way, us in row["host_us"].items())
                print(f"host's time of a call, {row['tokens']} token (us): {told}")
    report["cases"] = rows
    return report


def measure(provider: Provider, tokens: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of all ways for one number of tokens; at the least number on a GPU the host's share too."""
    ways = make_ways(provider, tokens, device)
    row: dict[str, Any] = {"provider": provider.name, "tokens": tokens, "sequences": min(tokens, MOST_SEQUENCES)}
    row |= {f"{way}_ms": us / 1e3 for way, us in timing.drained_us(ways, device).items()}
    row["speedup"] = row["before_ms"] / row["after_ms"]
    if device.type == "cuda" and tokens == TOKENS[0] and provider.name != "torch":
        row["host_us"] = {way: timing.host_us(call) for way, call in ways.items()}
    return row


def make_ways(provider: Provider, tokens: int, device: torch.device) -> dict[str, Call]:
    """The calls "before" and "after", and for FlashKDA "stock"."""
    case = _case(tokens)
    inputs = draw(case, device)
    sequences = len(case.lens)
    pool = torch.zeros(_POOL_ROWS, HEADS, HEAD_DIM, HEAD_DIM, dtype=STATE_DTYPE, device=device)
    rows = torch.arange(3, 3 + sequences, dtype=torch.int32, device=device)
    has_state = torch.arange(sequences, device=device) % 2 == 0
    state = pool, rows, has_state
    layer = KdaWorkspace(max(TOKENS), MOST_SEQUENCES, HEADS, HEAD_DIM, DTYPE, STATE_DTYPE, provider)
    layer.reserve(checkpoint=False)
    ways: dict[str, Call] = {
        "before": functools.partial(_before, _ALLOCATING[provider.name], inputs, *state),
        "after": functools.partial(_after, layer, provider, inputs, *state),
    }
    if provider.name == "flashkda" and providers.flashkda()[1]:
        ways["stock"] = functools.partial(_vllm_layer, layer, inputs, *state)
    return ways


def _case(tokens: int) -> Case:
    sequences = min(tokens, MOST_SEQUENCES)
    return Case(HEADS, f"{sequences} of {tokens}", (tokens // sequences,) * sequences, "bounded", "fast")


def _after(
    layer: KdaWorkspace,
    provider: Provider,
    x: Inputs,
    pool: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
) -> torch.Tensor:
    buffers = layer.take(x.q.shape[1], len(rows), final_state=not provider.pools, out=True, checkpoint=False)
    out, _ = kda_prefill(
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        x.lower_bound,
        pool,
        x.cu_seqlens,
        buffers.out,
        buffers.final_state,
        buffers.scratch,
        provider=provider,
        state_indices=rows,
        has_initial_state=has_state,
    )
    return out


def _before(
    kernel: Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    x: Inputs,
    pool: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
) -> torch.Tensor:
    out, final_state = kernel(x, _gather(pool, rows, has_state))
    pool[rows] = final_state.to(pool.dtype)
    return out


def _gather(pool: torch.Tensor, rows: torch.Tensor, has_state: torch.Tensor) -> torch.Tensor:
    if pool.is_cuda:
        from vllm.model_executor.layers.mamba.ops.gather_initial_states import gather_initial_states

        return gather_initial_states(pool, rows, has_state)
    return pool[rows].masked_fill_(~has_state[:, None, None, None], 0)


def _allocating_flashkda(x: Inputs, initial_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens, heads, _ = x.q.shape
    fwd, of_vllm = providers.flashkda()
    size = PROVIDERS["flashkda"].scratch_bytes(tokens, len(initial_state), heads, HEAD_DIM)
    scratch = torch.empty(size, dtype=torch.uint8, device=x.q.device)
    out, final_state = torch.empty_like(x.q), torch.empty_like(initial_state)
    fwd(
        x.q.contiguous(),
        x.k.contiguous(),
        x.v.contiguous(),
        x.g.contiguous(),
        x.beta,
        x.q.shape[-1] ** -0.5,
        out,
        scratch,
        x.A_log.contiguous(),
        x.dt_bias.view(-1, x.q.shape[-1]).contiguous(),
        x.lower_bound,
        initial_state.contiguous(),
        final_state,
        x.cu_seqlens.contiguous() if of_vllm else x.cu_seqlens.long(),
    )
    return out, final_state


def _allocating_triton(x: Inputs, initial_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import chunk_kda_with_fused_gate

    out, final_state = chunk_kda_with_fused_gate(
        q=x.q,
        k=x.k,
        v=x.v,
        raw_g=x.g,
        raw_beta=x.beta,
        A_log=x.A_log,
        g_bias=x.dt_bias,
        lower_bound=x.lower_bound,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=x.cu_seqlens,
        out=torch.empty_like(x.q),
    )
    return out, final_state


def _allocating_torch(x: Inputs, initial_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm_kda_plugin.kda.reference import chunked

    tensors = x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.lower_bound, initial_state, x.cu_seqlens
    result = chunked(*tensors)
    return result.out.to(x.q.dtype), result.final_state


def _allocating_native(x: Inputs, initial_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, final_state = torch.empty_like(x.q), torch.empty_like(initial_state)
    inputs = x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens
    size = PROVIDERS["native"].scratch_bytes(x.q.shape[1], len(initial_state), HEADS, HEAD_DIM)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.q.device)
    kda_native.prefill(kda_native.Tensors(*inputs, out, final_state, initial_state), x.lower_bound, workspace)
    return out, final_state


_ALLOCATING = {
    "flashkda": _allocating_flashkda,
    "triton": _allocating_triton,
    "torch": _allocating_torch,
    "native": _allocating_native,
}


def _vllm_layer(
    layer: KdaWorkspace, x: Inputs, pool: torch.Tensor, rows: torch.Tensor, has_state: torch.Tensor
) -> torch.Tensor:
    """The lines of vLLM's layer of Kimi K3 from the gather of states to their scatter."""
    from vllm.models.kimi_k3.nvidia.kda import _flashkda_prefill
    from vllm.v1.worker.workspace import current_workspace_manager

    initial_state = _gather(pool, rows, has_state)
    scratch, final_state, out, _ = current_workspace_manager().get_simultaneous(
        *layer.specs(layer.max_tokens, layer.max_sequences)
    )
    out, final_state = _flashkda_prefill(
        q=x.q,
        k=x.k,
        v=x.v,
        g=x.g,
        beta=x.beta,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        lower_bound=x.lower_bound,
        initial_state=initial_state,
        cu_seqlens=x.cu_seqlens,
        out=out[:, : x.q.shape[1]],
        final_state=final_state[: len(initial_state)],
        workspace=scratch,
    )
    pool[rows] = final_state.to(pool.dtype)
    return out
