"""Inputs that break kernels of Kimi Delta Attention, and how near to float64 a result must be all the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.support.kda_calls import Args, arguments, expected, rows_of_pool
from vllm_kda_plugin.kda.prefill import kda_prefill
from vllm_kda_plugin.kda.providers import Case, Provider

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65)
PRIMES = (2, 3, 31, 127, 131, 257)
HALF_EMPTY = (33, 0, 1, 0, 64, 0, 200, 0, 15, 0, 16, 0, 17, 0, 129, 0)
"""Sixteen sequences."""
LONG = (613, 90)
BOUND = -5.0


class Numbers(NamedTuple):
    """A kind of inputs."""

    name: str
    change: Callable[[Args], None]
    lens: Sequence[int] = LONG
    bounds: Sequence[float | None] = (BOUND, None)


def _nothing(args: Args) -> None:
    pass


def _repeated_keys(args: Args) -> None:
    """One key all along, hardly any decay: the system that a chunk solves is as bad as it gets."""
    args["k"][:] = args["k"][:, :1]
    args["dt_bias"].fill_(-6)
    args["A_log"].zero_()
    args["beta"].fill_(4)


def _slow(args: Args) -> None:
    args["g"] *= 0.3
    args["dt_bias"].fill_(-6)


def _at_the_bound(args: Args) -> None:
    args["g"].fill_(200)


def _thousands_of_nats(args: Args) -> None:
    """Up to 2,661 nats in one token, as gates of Kimi-Linear reach."""
    args["A_log"].fill_(4.5)
    args["g"] *= 12
    args["g"][0, ::7] = 29.6
    args["dt_bias"].zero_()


def _no_decay(args: Args) -> None:
    args["g"].fill_(-200)


def _beta_0_and_1(args: Args) -> None:
    args["beta"].fill_(100)
    args["beta"][:, ::2] = -100


def _zero_vectors(args: Args) -> None:
    for name, step in (("q", 3), ("k", 2), ("v", 5)):
        args[name][:, ::step] = 0


def _tiny(args: Args) -> None:
    for name in "qk":
        args[name] *= 1e-3


NUMBERS = (
    *(Numbers(f"one sequence of {length}", _nothing, (length,)) for length in LENGTHS + PRIMES),
    Numbers("all lengths", _nothing, LENGTHS + PRIMES),
    Numbers("half of sixteen empty", _nothing, HALF_EMPTY),
    Numbers("slow decay", _slow),
    Numbers("repeated keys, slow decay", _repeated_keys),
    Numbers("all gates at the bound", _at_the_bound, bounds=(BOUND,)),
    Numbers("no decay", _no_decay),
    Numbers("thousands of nats", _thousands_of_nats, bounds=(None,)),
    Numbers("beta at 0 and 1", _beta_0_and_1),
    Numbers("zero vectors", _zero_vectors),
    Numbers("tiny vectors", _tiny),
)
KINDS = [(numbers, bound) for numbers in NUMBERS for bound in numbers.bounds]
IDS = [f"{numbers.name}, {'softplus' if bound is None else 'bounded'}" for numbers, bound in KINDS]


def claims(provider: Provider, args: Args) -> bool:
    """Whether the provider says that it can run such a call."""
    q = args["q"]
    capability = torch.cuda.get_device_capability() if q.is_cuda else None
    case = Case(q.device.type, capability, q.shape[-1], q.dtype, args["final_state"].dtype, args["lower_bound"])
    return provider.why_not(case) is None


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, of the head that is worst; what is tiny counts as 0.001.

    Args:
        found, wanted: ``[..., H, a, b]`` or, with a of 1, ``[H, b]``. Of no elements the error is 0.
    """
    assert found.shape == wanted.shape
    if not wanted.numel():
        return 0.0
    difference = (found.double() - wanted).flatten(1).norm(dim=1)
    size = wanted.flatten(1).square().mean(1).sqrt().clamp(min=1e-3) * wanted[0].numel() ** 0.5
    worst = (difference / size).max()
    return float("inf") if bool(worst.isnan()) else float(worst)


def check(args: Args, tolerance: float) -> None:
    """Make the call; output, states and checkpoint are within tolerance of float64, of every sequence and head."""
    pool = "state_indices" in args
    initial_state = rows_of_pool(args) if pool else args["initial_state"]
    wanted = expected(args, initial_state, torch.float64)
    kda_prefill(**args)
    bounds = args["cu_seqlens"].tolist()
    final_state = args["initial_state"][args["state_indices"].long()] if pool else args["final_state"]
    assert bool((args["out"][:, bounds[-1] :] == 7).all()), "padding was written"
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = final_state[n]
        if begin < end:
            out = error(args["out"][0, begin:end].transpose(0, 1), wanted.out[0, begin:end].transpose(0, 1))
            assert out < tolerance, f"output of sequence {n} of {end - begin} tokens errs by {out:.1e}"
        assert error(state, wanted.final_state[n]) < tolerance, f"state of sequence {n} of {end - begin} tokens"
        if "checkpoint_state" in args and args["checkpoint_offsets"][n] > 0:
            assert wanted.checkpoint_state is not None
            assert error(args["checkpoint_state"][n], wanted.checkpoint_state[n]) < tolerance, f"checkpoint {n}"
    if pool and args["final_state"] is not None:
        assert torch.equal(args["final_state"], final_state)


def check_neighbours(provider: Provider, tolerance: float, **options: Any) -> None:
    """A sequence gives the same alone, and after one of its chunks, as in a batch, but for rounding."""
    whole = arguments(provider, HALF_EMPTY, 2, 128, **options)
    kda_prefill(**whole)
    bounds = whole["cu_seqlens"].tolist()
    for n in (0, 6, 14):
        begin, end = bounds[n : n + 2]
        for cuts in ([], [16], [7, 23]):
            state = whole["initial_state"][n : n + 1].clone()
            edges = [begin, *(begin + cut for cut in cuts), end]
            for first, last in itertools.pairwise(edges):
                alone = arguments(provider, (last - first,), 2, 128, **options)
                alone |= {name: whole[name][:, first:last].clone() for name in ("q", "k", "v", "g", "beta")}
                alone |= {name: whole[name] for name in ("A_log", "dt_bias")} | {"initial_state": state}
                kda_prefill(**alone)
                state = alone["final_state"].clone()
                out = error(alone["out"][0].transpose(0, 1), whole["out"][0, first:last].transpose(0, 1).double())
                assert out < tolerance, f"sequence {n} cut at {cuts} errs by {out:.1e}"
            assert error(state[0], whole["final_state"][n].double()) < tolerance


def check_padding(provider: Provider, *, padding: float = math.nan, **options: Any) -> None:
    """Neither padded tokens nor what lies behind the tensors change anything, to the bit.

    Args:
        provider: the kernel.
        padding: what padded tokens are full of; what lies behind is NaN.
        options: of :func:`arguments`.
    """
    plain, padded, behind = (arguments(provider, HALF_EMPTY, 2, 128, padding=37, **options) for _ in range(3))
    tokens = sum(HALF_EMPTY)
    for name in ("q", "k", "v", "g", "beta"):
        padded[name][:, tokens:] = padding
        behind[name][:, tokens:] = math.nan
    behind |= {name: behind[name][:, :tokens] for name in ("q", "k", "v", "g", "beta", "out")}
    for args in (plain, padded, behind):
        kda_prefill(**args)
    for args in (padded, behind):
        assert torch.equal(args["out"][:, :tokens], plain["out"][:, :tokens])
        assert torch.equal(args["final_state"], plain["final_state"])
        assert bool((args["out"][:, tokens:] == 7).all()), "padding was written"
