"""What ``vllm-kda bench kda`` measures: the cases, random tensors for them, and how far a result is from float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import torch

from vllm_kda_plugin.kda.prefill import kda_prefill, scratch_bytes
from vllm_kda_plugin.kda.providers import Case as Layer
from vllm_kda_plugin.kda.providers import Provider
from vllm_kda_plugin.kda.reference import chunked

HEADS = (4, 12, 16, 32, 64, 96)
SKEWED = (6000, 1500, 500, 100, 61, 17, 13, 1)
SEQUENCES: dict[str, tuple[int, ...]] = {
    "1x2048": (2048,),
    "1x8192": (8192,),
    "1x32768": (32768,),
    "8x1024": (1024,) * 8,
    "32x256": (256,) * 32,
    "skewed": SKEWED,
}
SMALL_HEADS = (4,)
SMALL_SEQUENCES: dict[str, tuple[int, ...]] = {"1x512": (512,), "8x64": (64,) * 8, "skewed": (375, 93, 31, 8, 3, 1, 1)}
GATES = {"bounded": -5.0, "softplus": None}
Decay = Literal["fast", "slow"]
DECAYS: dict[Decay, tuple[float, float]] = {"fast": (1.0, 0.0), "slow": (0.3, -6.0)}
"""Standard deviation of the gate's raw logits, and dt_bias. Most trained layers decay slowly."""
HEAD_DIM = 128
DTYPE, STATE_DTYPE = torch.bfloat16, torch.float32
_CHECKED_HEADS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One prefill of a batch, from random states."""

    heads: int
    sequences: str
    lens: tuple[int, ...]
    gate: str
    decay: Decay

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    @property
    def bytes_moved(self) -> int:
        """The least that any kernel reads and writes: q, k, v, g, beta and the output, each state in and out."""
        a_token = (5 * HEAD_DIM + 1) * DTYPE.itemsize
        a_state = 2 * HEAD_DIM * HEAD_DIM * STATE_DTYPE.itemsize
        return self.heads * (self.tokens * a_token + len(self.lens) * a_state)

    def layer(self, device: torch.device) -> Layer:
        """What a provider is asked whether it can."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return Layer(device.type, capability, HEAD_DIM, DTYPE, STATE_DTYPE, GATES[self.gate])


def cases(on_cpu: bool) -> Iterator[Case]:
    """Everything that is measured; less of it, and smaller, on a CPU."""
    for gate in GATES:
        for decay in DECAYS:
            for heads in SMALL_HEADS if on_cpu else HEADS:
                for name, lens in (SMALL_SEQUENCES if on_cpu else SEQUENCES).items():
                    yield Case(heads, name, lens, gate, decay)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tensors of a case, as ``kda_prefill`` names them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    initial_state: torch.Tensor
    cu_seqlens: torch.Tensor


def draw(case: Case, device: torch.device) -> Inputs:
    """Random tensors, the same each time: normal but for dt_bias and A_log, which are the same everywhere."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    std, dt_bias = DECAYS[case.decay]
    shape = (1, case.tokens, case.heads, HEAD_DIM)
    q, k, v, g = (normal(*shape) for _ in range(4))
    return Inputs(
        q,
        k,
        v,
        g * std,
        normal(*shape[:3]),
        torch.zeros(case.heads, device=device),
        torch.full((case.heads * HEAD_DIM,), dt_bias, device=device),
        GATES[case.gate],
        normal(len(case.lens), case.heads, HEAD_DIM, HEAD_DIM, dtype=STATE_DTYPE) * 0.1,
        torch.tensor([0, *case.lens], device=device).cumsum(0).int(),
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """``kda_prefill`` by one provider, with buffers of its own."""

    inputs: Inputs
    provider: Provider
    out: torch.Tensor
    final_state: torch.Tensor
    workspace: torch.Tensor
    max_seqlen: int
    """As an engine's host knows it."""

    @classmethod
    def make(cls, inputs: Inputs, provider: Provider) -> Call:
        """Allocates the buffers, full of what no result is."""
        _, tokens, heads, dim = inputs.q.shape
        size = scratch_bytes(provider, tokens, len(inputs.initial_state), heads, dim, DTYPE, STATE_DTYPE)
        out, final_state = torch.full_like(inputs.q, torch.nan), torch.full_like(inputs.initial_state, torch.nan)
        workspace = inputs.q.new_empty(size, dtype=torch.uint8)
        return cls(inputs, provider, out, final_state, workspace, int(inputs.cu_seqlens.diff().max()))

    def __call__(self) -> None:
        tensors = [getattr(self.inputs, field.name) for field in dataclasses.fields(self.inputs)]
        buffers = self.out, self.final_state, self.workspace
        kda_prefill(*tensors, *buffers, provider=self.provider, max_seqlen=self.max_seqlen)


class Reference:
    """The results of a case in float64, of some heads: the first, the last, and some between them."""

    def __init__(self, inputs: Inputs) -> None:
        heads = inputs.q.shape[2]
        self.heads = sorted({round(i * (heads - 1) / (_CHECKED_HEADS - 1)) for i in range(_CHECKED_HEADS)})
        at = self.heads
        result = chunked(
            *(x[:, :, at] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)),
            inputs.A_log[at],
            inputs.dt_bias.view(heads, -1)[at],
            inputs.lower_bound,
            inputs.initial_state[:, at],
            inputs.cu_seqlens,
            dtype=torch.float64,
        )
        self.out, self.final_state = result.out, result.final_state

    def errors(self, call: Call) -> tuple[float, float]:
        """Norm of the error over the norm of the result, for the output and for the final states."""
        pairs = (call.out[:, :, self.heads], self.out), (call.final_state[:, self.heads], self.final_state)
        out, state = (float((found.double() - wanted).norm() / wanted.norm()) for found, wanted in pairs)
        return out, state
