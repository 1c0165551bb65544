"""The kernels that can run a KDA prefill: what each is able to do, what it needs, and which is taken."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from vllm_kda_plugin.kda.reference import chunked
from vllm_kda_plugin.kernels import kda_native

_FLASHKDA_OF_VLLM, _FLASHKDA_PACKAGE = "vllm._flashkda_C", "flash_kda_C"
_FLASHKDA_GPUS = (9, 10, 12)  # Major compute capabilities that vLLM compiles FlashKDA for.
_FLASHKDA_LEAST_BOUND = -5.0  # 16 tokens of it are 80 nats; from 88 on float32 overflows.
_FLASHKDA_CHECKPOINT_STEP = 16
_NATIVE_GPU = (9, 0)
_NATIVE_LEAST_BOUND = -5.0  # 16 tokens of it are 116 powers of two; bfloat16 ends at 127.
_FLASH_DTYPES = (torch.bfloat16,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """What a layer asks of a kernel.

    Attributes:
        device: ``cpu`` or ``cuda``.
        capability: major and minor of the GPU, None without one.
        head_dim: of keys and values.
        dtype: of q, k, v, g, beta and the output.
        state_dtype: of the states.
        lower_bound: of the bounded gate, None for the softplus gate.
    """

    device: str
    capability: tuple[int, int] | None
    head_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    lower_bound: float | None


class Call(NamedTuple):
    """The checked tensors of one prefill, as :func:`vllm_kda_plugin.kda.prefill.kda_prefill` takes them.

    States are dense ``[N, H, V, K]`` here, but for ``initial_state`` where ``state_indices`` is given, to a provider of
    pools only: then it is the pool, and ``final_state`` may be None. ``scratch`` is the provider's own part of the
    workspace.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor
    out: torch.Tensor
    final_state: torch.Tensor | None
    scratch: torch.Tensor
    checkpoint_state: torch.Tensor | None
    checkpoint_offsets: torch.Tensor | None
    state_indices: torch.Tensor | None = None
    has_initial_state: torch.Tensor | None = None
    max_seqlen: int | None = None


class Provider(Protocol):
    """One kernel."""

    name: str
    dense_inputs: bool
    """Whether q, k, v and g must be contiguous; else the distance from token to token is free."""
    strided_heads: bool
    """Whether the distance from head to head is free too, in q, k, v, g and beta."""
    pools: bool
    """Whether it reads and writes the rows of a pool of states itself; else it is given dense ones."""
    alignment: int
    """Bytes at which every tensor must start, and of which the distance from token to token is a multiple."""

    @property
    def checkpoint_step(self) -> int:
        """Checkpoints may be taken after multiples of so many tokens; 0: none at all."""
        ...

    def __hash__(self) -> int:
        """Providers are told apart by identity."""
        ...

    def why_not(self, case: Case) -> str | None:
        """Why this kernel cannot run such a layer here, None if it can."""
        ...

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """Bytes of scratch for a call; no less for more tokens or sequences."""
        ...

    def run(self, call: Call) -> None:
        """Write output, final state and checkpoint state of a case that the kernel can run."""
        ...


class TorchProvider:
    """The chunk form in torch: the path of the CPU, exact for every gate, head size and dtype."""

    name = "torch"
    strided_heads = False
    pools = False
    dense_inputs = False
    alignment = 1
    checkpoint_step = 1

    def why_not(self, case: Case) -> str | None:
        """It runs everything; see :class:`Provider`."""
        return _unlike("dtype", case.dtype, _FLOATS) or _unlike("state dtype", case.state_dtype, _FLOATS)

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """None: torch allocates its own."""
        return 0

    def run(self, call: Call) -> None:
        """Computed in float32. On CUDA it synchronises, to read ``cu_seqlens``."""
        result = chunked(
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            call.A_log,
            call.dt_bias,
            call.lower_bound,
            call.initial_state,
            call.cu_seqlens,
            checkpoint_offsets=call.checkpoint_offsets,
        )
        num_tokens = int(call.cu_seqlens[-1])
        call.out[:, :num_tokens].copy_(result.out[:, :num_tokens])
        assert call.final_state is not None
        call.final_state.copy_(result.final_state)
        if call.checkpoint_state is not None:
            call.checkpoint_state.copy_(result.checkpoint_state)


class TritonProvider:
    """vLLM's chunk kernels in Triton: both gates, any NVIDIA GPU that vLLM supports, some 15 launches a call."""

    name = "triton"
    strided_heads = False
    pools = False
    dense_inputs = True  # vLLM makes them so itself, by an allocation each
    alignment = 16
    checkpoint_step = 0

    def why_not(self, case: Case) -> str | None:
        """See :class:`Provider`."""
        if case.device != "cuda":
            return f"it needs a GPU, this layer is on {case.device}"
        return (
            _unlike("dtype", case.dtype, (torch.bfloat16, torch.float16))
            or _unlike("state dtype", case.state_dtype, (torch.float32, torch.bfloat16))
            or _missing("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
        )

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """None: vLLM's wrapper allocates its intermediates and takes no buffers for them."""
        return 0

    def run(self, call: Call) -> None:
        """The final state is allocated by vLLM's wrapper and copied; if a sequence is empty, initial states are too."""
        from vllm.models.kimi_k3.nvidia.ops.third_party.kda import chunk_kda_with_fused_gate

        initial_state = call.initial_state
        assert call.final_state is not None
        if initial_state is None:
            initial_state = call.final_state.zero_()
        version = 0 if call.cu_seqlens.is_inference() else call.cu_seqlens._version
        cu_seqlens, full = _without_empty(call.cu_seqlens, version)
        if full is not None:
            if call.initial_state is not None:
                call.final_state.copy_(initial_state)
            if len(full) == 0:
                return
            initial_state = initial_state[full]
        _, final_state = chunk_kda_with_fused_gate(
            q=call.q,
            k=call.k,
            v=call.v,
            raw_g=call.g,
            raw_beta=call.beta,
            A_log=call.A_log,
            g_bias=call.dt_bias,
            lower_bound=call.lower_bound,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
            out=call.out,
        )
        if full is None:
            call.final_state.copy_(final_state)
        else:
            call.final_state[full] = final_state.to(call.final_state.dtype)


@functools.lru_cache(maxsize=8)  # By identity: the layers of a step, in a few groups, ask the same.
def _without_empty(given: torch.Tensor, version: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``cu_seqlens`` without empty sequences, which vLLM's kernels take for others, and which are left; None if all.

    Waits for the GPU, as the wrapper of these kernels does.
    """
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    with gpu_sync_allowed():
        bounds = given.tolist()
        full = [n for n, (start, end) in enumerate(itertools.pairwise(bounds)) if start < end]
        if len(full) == len(bounds) - 1:
            # Another tensor all the same: the wrapper remembers one by its identity, whatever it holds later.
            return given.view(-1), None
        index = torch.tensor(full, dtype=torch.int64, device=given.device)
        return torch.cat((given[:1], given[1:][index])), index


class FlashKdaProvider:
    """FlashKDA: the bounded gate, heads of 128, bfloat16. It keeps its state in bfloat16 between chunks of 16 tokens.

    vLLM's own build of it takes checkpoints; without that, the package ``flash_kda`` will do.

    The last chunk of a sequence takes in up to 15 tokens after it, times zero. So NaN or infinity in these, be they
    another sequence's or padding, reach the sequence, as they do in stock vLLM. Nothing after the end of q is read.
    """

    name = "flashkda"
    strided_heads = False
    pools = False
    dense_inputs = True
    alignment = 16

    @property
    def checkpoint_step(self) -> int:
        """See :class:`Provider`."""
        return _FLASHKDA_CHECKPOINT_STEP if _missing(_FLASHKDA_OF_VLLM) is None else 0

    def why_not(self, case: Case) -> str | None:
        """See :class:`Provider`. The gate's range is what the kernel itself does not check."""
        if case.device != "cuda" or case.capability is None:
            return f"it needs a GPU, this layer is on {case.device}"
        if case.capability[0] not in _FLASHKDA_GPUS:
            return f"it needs compute capability 9, 10 or 12, this GPU has {case.capability[0]}.{case.capability[1]}"
        if case.lower_bound is None:
            return "it does the bounded gate only, this layer's is softplus"
        if not _FLASHKDA_LEAST_BOUND <= case.lower_bound < 0:
            return f"it needs a lower bound in [{_FLASHKDA_LEAST_BOUND}, 0), this layer's is {case.lower_bound}"
        if case.head_dim != 128:
            return f"it needs heads of 128, this layer's are {case.head_dim}"
        wrong_dtype = _unlike("dtype", case.dtype, _FLASH_DTYPES) or _unlike(
            "state dtype", case.state_dtype, (torch.float32, torch.bfloat16)
        )
        if wrong_dtype or _missing(_FLASHKDA_PACKAGE) is None:
            return wrong_dtype
        return _missing(_FLASHKDA_OF_VLLM)

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """What the kernel says, which it does not check."""
        return _flashkda_scratch_bytes(num_tokens, num_sequences, num_heads)

    def run(self, call: Call) -> None:
        """One call; beta is transposed by the kernel's wrapper."""
        A_log = call.A_log if call.A_log.dim() == 1 else call.A_log.view(-1)
        dt_bias = call.dt_bias if call.dt_bias.dim() == 2 else call.dt_bias.view(-1, call.q.shape[-1])
        beta, cu_seqlens = call.beta, call.cu_seqlens
        checkpoints: tuple[torch.Tensor | None, ...] = (call.checkpoint_state, call.checkpoint_offsets)
        fwd, of_vllm = flashkda()
        if not of_vllm:  # it is more particular; both are small
            beta, cu_seqlens, checkpoints = beta.contiguous(), cu_seqlens.long(), ()
        fwd(
            call.q,
            call.k,
            call.v,
            call.g,
            beta,
            call.q.shape[-1] ** -0.5,
            call.out,
            call.scratch,
            A_log,
            dt_bias,
            call.lower_bound,
            call.initial_state,
            call.final_state,
            cu_seqlens,
            *checkpoints,
        )


class NativeProvider:
    """Our own kernel for Hopper: both gates, heads of 128, bfloat16, states carried in float32."""

    name = "native"
    strided_heads = True
    dense_inputs = False
    pools = True
    alignment = 16
    checkpoint_step = kda_native.CHUNK

    def why_not(self, case: Case) -> str | None:
        """See :class:`Provider`."""
        if case.device != "cuda" or case.capability is None:
            return f"it needs a GPU, this layer is on {case.device}"
        if case.capability != _NATIVE_GPU:
            return f"it needs compute capability 9.0, this GPU has {case.capability[0]}.{case.capability[1]}"
        if case.lower_bound is not None and not _NATIVE_LEAST_BOUND <= case.lower_bound < 0:
            return f"it needs a lower bound in [{_NATIVE_LEAST_BOUND}, 0), this layer's is {case.lower_bound}"
        if case.head_dim != kda_native.HEAD_DIM:
            return f"it needs heads of {kda_native.HEAD_DIM}, this layer's are {case.head_dim}"
        return (
            _unlike("dtype", case.dtype, _FLASH_DTYPES)
            or _unlike("state dtype", case.state_dtype, (torch.float32, torch.bfloat16))
            or _missing("cupy")
        )

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """Of the segments of long sequences; bounded, whatever the call."""
        return kda_native.workspace_bytes(num_tokens, num_heads)

    def run(self, call: Call) -> None:
        """One launch, or two or three where sequences are cut into segments."""
        tensors = kda_native.Tensors(
            q=call.q,
            k=call.k,
            v=call.v,
            g=call.g,
            beta=call.beta,
            A_log=call.A_log,
            dt_bias=call.dt_bias,
            cu_seqlens=call.cu_seqlens,
            out=call.out,
            final_state=call.final_state,
            initial_state=call.initial_state,
            state_indices=call.state_indices,
            has_initial_state=call.has_initial_state,
            checkpoint_state=call.checkpoint_state,
            checkpoint_offsets=call.checkpoint_offsets,
        )
        kda_native.prefill(
            tensors,
            call.lower_bound,
            call.scratch,
            max_seqlen=call.max_seqlen,
            batch_invariant=batch_invariant(),
        )


@functools.cache
def batch_invariant() -> bool:
    """vLLM's own switch: a sequence's result must not depend on the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


@functools.cache
def flashkda() -> tuple[Callable[..., None], bool]:
    """FlashKDA's function, and whether it is the one in vLLM, which takes checkpoints and int32 ``cu_seqlens``."""
    if _missing(_FLASHKDA_OF_VLLM) is None:
        return torch.ops._flashkda_C.fwd.default, True
    return importlib.import_module(_FLASHKDA_PACKAGE).fwd, False


@functools.lru_cache(maxsize=4096)  # Every layer of a step asks the same, several times.
def _flashkda_scratch_bytes(num_tokens: int, num_sequences: int, num_heads: int) -> int:
    source = torch.ops._flashkda_C if flashkda()[1] else importlib.import_module(_FLASHKDA_PACKAGE)
    return int(source.get_workspace_size(num_tokens, num_heads, max(num_sequences, 1)))


PROVIDERS: dict[str, Provider] = {
    provider.name: provider for provider in (FlashKdaProvider(), TritonProvider(), TorchProvider(), NativeProvider())
}
"""Best first, but for those that are taken only when asked for, or where they were measured."""
_ONLY_BY_NAME = ("native",)


def select(choice: str, case: Case) -> Provider:
    """The provider of a layer.

    Args:
        choice: the setting ``kda_plugin.prefill``.
        case: the layer.

    Raises:
        ValueError: what was chosen cannot run this layer here, with the reason.
    """
    if choice != "auto":
        reason = PROVIDERS[choice].why_not(case)
        if reason:
            raise ValueError(f"kda_plugin.prefill = {choice} cannot run this layer: {reason}; {_usable(case)}")
        return PROVIDERS[choice]
    automatic = {name: provider for name, provider in PROVIDERS.items() if name not in _ONLY_BY_NAME}
    for provider in automatic.values():
        if provider.why_not(case) is None:
            return provider
    reasons = "; ".join(f"{name}: {provider.why_not(case)}" for name, provider in automatic.items())
    raise ValueError(f"no KDA prefill can run this layer: {reasons}")


def _usable(case: Case) -> str:
    names = [name for name, provider in PROVIDERS.items() if provider.why_not(case) is None]
    return f"allowed here are {', '.join(['auto', *names])}"


def _unlike(what: str, found: torch.dtype, allowed: tuple[torch.dtype, ...]) -> str | None:
    if found in allowed:
        return None
    return f"it needs a {what} of {' or '.join(map(str, allowed))}, this layer's is {found}"


@functools.cache
def _missing(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a missing library may raise anything
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None
