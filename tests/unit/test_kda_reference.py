"""Kimi Delta Attention in torch: the recurrence against plain Python, the chunk form against the recurrence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kda_plugin.kda.reference import Result, chunked, log_decay, recurrence

FORMS = (recurrence, chunked)
GATES = (-5.0, -0.5, None)
HARD_LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 131, 257)

# Greatest error of one head's part of one sequence, in norm, relative to float64's.
EXACT = 1e-13  # Of two forms in float64.
SINGLE = 1e-5  # Of float32.


Case = dict[str, Any]  # Arguments of a call, numbers in float64.


def make_case(
    lens: list[int],
    *,
    num_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 12,
    lower_bound: float | None = -5.0,
    seed: int = 0,
    padding: int = 0,
    state: bool = True,
    **changes: Callable[[torch.Tensor], torch.Tensor],
) -> Case:
    """A random case. The change of an argument is a function from what was drawn to what is passed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        # Of few bits, so that float32 holds the same numbers.
        return torch.randn(*shape, generator=generator).bfloat16().double()

    tokens = sum(lens) + padding
    call: dict[str, Any] = {
        "q": draw(1, tokens, num_heads, key_dim),
        "k": draw(1, tokens, num_heads, key_dim),
        "v": draw(1, tokens, num_heads, value_dim),
        "g": draw(1, tokens, num_heads, key_dim),
        "beta": draw(1, tokens, num_heads),
        "A_log": draw(num_heads),
        "dt_bias": draw(num_heads * key_dim),
        "initial_state": draw(len(lens), num_heads, value_dim, key_dim) if state else None,
    }
    for name, change in changes.items():
        call[name] = change(call[name])
    call["lower_bound"] = lower_bound
    call["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    return call


def run(form: Callable[..., Result], case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> Result:
    with torch.inference_mode():
        return form(**{**case, **options}, dtype=dtype)


def in_single(case: Case) -> Case:
    return {name: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in case.items()}


def error(found: Result, true: Result, case: Case) -> float:
    """Greatest error of a head of a sequence, in norm, relative to the true one; of outputs and of states.

    Sums may cancel: a state counts as no smaller than what one token adds to it, outputs as no smaller than what a
    query of the state's direction would read.
    """
    assert (found.checkpoint_state is None) == (true.checkpoint_state is None)
    errors = [torch.zeros(1)]

    def compare(x: torch.Tensor, y: torch.Tensor, dims: tuple[int, int], least: torch.Tensor) -> torch.Tensor:
        size = torch.maximum(y.norm(dim=dims), least).clamp_min(1e-30)
        errors.append((x.double() - y).norm(dim=dims) / size)
        return size

    added = (case["beta"].sigmoid() * case["v"].norm(dim=-1))[0]
    for n, (start, end) in enumerate(itertools.pairwise(case["cu_seqlens"].tolist())):
        least = added[start:end].amax(0) if end > start else torch.zeros(added.shape[1])
        least = compare(found.final_state[n], true.final_state[n], (1, 2), least)
        if found.checkpoint_state is not None and true.checkpoint_state is not None:
            compare(found.checkpoint_state[n], true.checkpoint_state[n], (1, 2), least)
        one_read = least * true.final_state.shape[3] ** -0.5
        compare(found.out[0, start:end], true.out[0, start:end], (0, 2), one_read)
    worst = torch.cat(errors).max()  # NaN if there is one.
    assert worst.isfinite()
    return float(worst)


# ---- The recurrence against plain Python -----------------------------------------------------------------------------


def plain_gate(x: float, a_log: float, lower_bound: float | None) -> float:
    a = math.exp(a_log)
    if lower_bound is not None:
        return lower_bound / (1 + math.exp(-a * x))
    return -a * (max(x, 0.0) + math.log1p(math.exp(-abs(x))))


def plain_kda(case: Case) -> tuple[list[list[list[float]]], list[list[list[list[float]]]]]:
    """Outputs ``[T][H][V]`` and final states ``[N][H][K][V]``, in lists of numbers.

    The state is transposed, and a token's whole transition is a matrix: (I - beta k k^T) diag(alpha) S + beta k v^T.
    """
    call = {name: x.tolist() if torch.is_tensor(x) else x for name, x in case.items()}
    num_heads, key_dim, value_dim = len(call["A_log"]), len(call["q"][0][0][0]), len(call["v"][0][0][0])
    outputs: list[list[list[float]]] = []
    states = []
    for n, (start, end) in enumerate(itertools.pairwise(call["cu_seqlens"])):
        heads = [[list(column) for column in zip(*call["initial_state"][n][h], strict=True)] for h in range(num_heads)]
        for t in range(start, end):
            outputs.append([])
            for h, s in enumerate(heads):
                q, k = ([x / math.sqrt(sum(y * y for y in row) + 1e-6) for x in row] for row in
                        (call["q"][0][t][h], call["k"][0][t][h]))  # fmt: skip
                v, rate = call["v"][0][t][h], 1 / (1 + math.exp(-call["beta"][0][t][h]))
                alpha = [
                    math.exp(plain_gate(x + call["dt_bias"][h * key_dim + c], call["A_log"][h], call["lower_bound"]))
                    for c, x in enumerate(call["g"][0][t][h])
                ]
                moved = [
                    [
                        sum(((c == d) - rate * k[c] * k[d]) * alpha[d] * s[d][e] for d in range(key_dim))
                        + rate * k[c] * v[e]
                        for e in range(value_dim)
                    ]
                    for c in range(key_dim)
                ]
                s[:] = moved
                read = [sum(q[c] * s[c][e] for c in range(key_dim)) for e in range(value_dim)]
                outputs[-1].append([x / math.sqrt(key_dim) for x in read])
        states.append(heads)
    return outputs, states


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_are_what_plain_python_computes(form: Callable[..., Result], lower_bound: float | None) -> None:
    case = make_case([5, 0, 1, 11], key_dim=5, value_dim=3, lower_bound=lower_bound)
    outputs, states = plain_kda(case)
    out, final_state, checkpoint_state = run(form, case)
    assert (out.dtype, out.shape) == (torch.float64, case["v"].shape)
    torch.testing.assert_close(out[0], torch.tensor(outputs, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(final_state.mT, torch.tensor(states, dtype=torch.float64), rtol=0, atol=1e-14)
    assert checkpoint_state is None


def test_gates() -> None:
    g = torch.tensor([[[-40.0, -2.0], [0.0, 3.0]], [[19.0, 21.0], [700.0, -0.25]]], dtype=torch.float64)
    a_log, dt_bias = torch.tensor([0.5, -1.0]), torch.tensor([0.25, 0.0, -1.5, 0.5])
    for lower_bound in GATES:
        expected = [
            [[plain_gate(float(x) + float(b), float(a), lower_bound) for x, b in zip(row, bias, strict=True)]
             for row, bias, a in zip(token, dt_bias.view(2, 2), a_log, strict=True)]
            for token in g
        ]  # fmt: skip
        for a, b in itertools.product((a_log, a_log.view(1, 1, 2, 1)), (dt_bias, dt_bias.view(2, 2))):
            found = log_decay(g, a, b, lower_bound, torch.float64)
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)
            single = log_decay(g.bfloat16(), a, b, lower_bound)
            assert single.dtype == torch.float32
            torch.testing.assert_close(single, found.float(), rtol=1e-6, atol=1e-30)


# ---- The chunk form against the recurrence ---------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 150) | st.sampled_from(HARD_LENGTHS), max_size=5),
    num_heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    lower_bound=st.sampled_from(GATES),
    speed=st.sampled_from((-8.0, -2.0, 0.0, 4.0)),
    state=st.booleans(),
    data=st.data(),
)
def test_the_chunk_form_is_the_recurrence(
    lens: list[int],
    num_heads: int,
    dims: tuple[int, int],
    lower_bound: float | None,
    speed: float,
    state: bool,
    data: st.DataObject,
) -> None:
    key_dim, value_dim = dims
    case = make_case(
        lens,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        lower_bound=lower_bound,
        seed=data.draw(st.integers(0, 1 << 16)),
        padding=data.draw(st.integers(0, 3)),
        state=state,
        dt_bias=lambda x: x + speed,
    )
    offsets = torch.tensor([data.draw(st.integers(0, length)) for length in lens], dtype=torch.long)
    true = run(recurrence, case, checkpoint_offsets=offsets)
    found = run(chunked, case, checkpoint_offsets=offsets)
    assert error(found, true, case) < EXACT
    for form in FORMS:
        assert error(run(form, in_single(case), torch.float32, checkpoint_offsets=offsets), true, case) < SINGLE


def repeated(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand_as(x)


def alternating(x: torch.Tensor) -> torch.Tensor:
    return repeated(x) * torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(x.shape[1])[: x.shape[1], None, None]


def few(x: torch.Tensor) -> torch.Tensor:
    return x[:, torch.arange(x.shape[1]) % 3]


def zeros_among(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(x.shape[1]) % 3 > 0)[None, :, None, None]


def mixed_speeds(x: torch.Tensor) -> torch.Tensor:
    """Tokens and channels that forget all at once among others that forget almost nothing."""
    return torch.where(x > 0.5, 3000.0, -9.0)


SLOW: dict[str, Any] = {"dt_bias": lambda x: x - 12, "A_log": torch.zeros_like}
CERTAIN: dict[str, Any] = {"beta": lambda x: torch.full_like(x, 30.0)}
HARD: dict[str, dict[str, Any]] = {
    "random": {},
    "repeated keys, slow decay": {"k": repeated, **SLOW},
    "repeated keys, slow decay, beta 1": {"k": repeated, **SLOW, **CERTAIN},
    "keys of alternating sign, slow decay, beta 1": {"k": alternating, **SLOW, **CERTAIN},
    "three keys, slow decay, beta 1": {"k": few, **SLOW, **CERTAIN},
    "queries are the keys, all repeated": {"k": torch.ones_like, "q": torch.ones_like, **SLOW, **CERTAIN},
    "all gates at the bound": {"g": lambda x: torch.full_like(x, 50.0), "A_log": lambda x: x * 0 + 1},
    "no decay": {"g": lambda x: torch.full_like(x, -1000.0)},
    "decay above 2000 nats": {"g": lambda x: torch.full_like(x, 2000.0), "A_log": lambda x: x * 0 + 1},
    "decays of every size": {"g": lambda x: x * 8, "A_log": lambda x: x * 0 + 5},
    "all and nothing": {"g": mixed_speeds},
    "all and nothing, repeated keys, beta 1": {"g": mixed_speeds, "k": repeated, **CERTAIN},
    "around the overflow of 1 / decay": {"g": lambda x: x * 0 + 88.0 / 16, "A_log": torch.zeros_like},
    "beta 0": {"beta": lambda x: torch.full_like(x, -30.0)},
    "beta 1": CERTAIN,
    "beta 0 or 1": {"beta": lambda x: torch.where(x > 0, 30.0, -30.0)},
    "zero vectors": {"q": torch.zeros_like, "k": torch.zeros_like, "v": torch.zeros_like},
    "zero vectors among others": {"q": zeros_among, "k": zeros_among, "v": zeros_among},
    "great and small vectors": {"q": lambda x: x * 1e6, "k": lambda x: x * 1e-6, "v": lambda x: x * 1e6},
}


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("hard", HARD)
def test_hard_cases(hard: str, lower_bound: float | None) -> None:
    offsets = torch.tensor([length // 2 for length in HARD_LENGTHS])
    for state in (False, True):
        case = make_case(list(HARD_LENGTHS), lower_bound=lower_bound, state=state, **HARD[hard])
        true = run(recurrence, case, checkpoint_offsets=offsets)
        assert error(run(chunked, case, checkpoint_offsets=offsets), true, case) < EXACT
        for form in FORMS:
            found = run(form, in_single(case), torch.float32, checkpoint_offsets=offsets)
            assert error(found, true, case) < SINGLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_past_2000_nats_a_token_reads_nothing_but_itself(form: Callable[..., Result], dtype: torch.dtype) -> None:
    case = make_case([131], lower_bound=None, **HARD["decay above 2000 nats"])
    assert log_decay(case["g"], case["A_log"], case["dt_bias"], None).max() < -2000
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (case["q"], case["k"]))
    update = case["beta"].sigmoid().unsqueeze(-1) * case["v"]
    found = run(form, case, dtype)
    tolerance = {"rtol": 0.0, "atol": 1e-6 if dtype == torch.float32 else 1e-14}
    torch.testing.assert_close(found.out.double(), update * (q * k).sum(-1, keepdim=True) / 4, **tolerance)
    state = update[0, -1].unsqueeze(-1) * k[0, -1].unsqueeze(-2)
    torch.testing.assert_close(found.final_state[0].double(), state, **tolerance)


def test_a_state_that_outlives_thousands_of_tokens_keeps_its_precision() -> None:
    def gate(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, math.log(math.expm1(1.1e-4)))  # softplus gives 1.1e-4 nats a token.

    slow: dict[str, Any] = {"A_log": torch.zeros_like, "dt_bias": torch.zeros_like, "g": gate}
    case = make_case([12000], num_heads=1, key_dim=4, value_dim=4, lower_bound=None, k=torch.zeros_like, **slow)
    expected = case["initial_state"] * math.exp(-1.1e-4 * 12000)
    found = run(chunked, in_single(case), torch.float32).final_state
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)


def test_sixteen_sequences_of_which_half_are_empty() -> None:
    lens = [0, 301, 0, 0, 7, 64, 0, 1, 8, 0, 0, 9, 128, 0, 200, 0]
    assert (len(lens), lens.count(0)) == (16, 8)
    case = make_case(lens, key_dim=128, value_dim=128, padding=5)
    true = run(recurrence, case)
    found = run(chunked, case)
    assert error(found, true, case) < EXACT
    assert error(run(chunked, in_single(case), torch.float32), true, case) < SINGLE
    for result in (true, found):
        for n, length in enumerate(lens):
            assert torch.equal(result.final_state[n], case["initial_state"][n]) == (length == 0)


@pytest.mark.parametrize("window", [1, 300, 1000])
def test_windows_change_nothing(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([400, 3, 0, 129, 70, 3, 640], num_heads=3)
    offsets = torch.tensor([64, 1, 0, 129, 33, 3, 640])
    whole = run(chunked, case, checkpoint_offsets=offsets)
    monkeypatch.setattr("vllm_kda_plugin.kda.reference._WINDOW", window)
    assert error(run(chunked, case, checkpoint_offsets=offsets), whole, case) < EXACT


# ---- Sequences, states and checkpoints -------------------------------------------------------------------------------


def part(case: Case, start: int, end: int, state: torch.Tensor | None) -> Case:
    """Tokens of a case of one sequence."""
    call = {name: case[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
    call |= {"initial_state": state, "cu_seqlens": torch.tensor([0, end - start])}
    return {**case, **call}


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("form", FORMS)
def test_two_calls_are_one(form: Callable[..., Result], lower_bound: float | None) -> None:
    case = make_case([151], lower_bound=lower_bound, dt_bias=lambda x: x - 4)
    whole = run(form, case)
    for cut in (0, 1, 15, 16, 37, 64, 128, 150, 151):
        head = run(form, part(case, 0, cut, case["initial_state"]))
        tail = run(form, part(case, cut, 151, head.final_state))
        joined = Result(torch.cat((head.out, tail.out), 1), tail.final_state, None)
        assert error(joined, whole, case) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_are_the_final_states_of_shorter_calls(form: Callable[..., Result], dtype: torch.dtype) -> None:
    case = make_case([200], dt_bias=lambda x: x - 4)
    plain = run(form, case, dtype)
    for index, offset in itertools.product((torch.int32, torch.int64), (0, 1, 16, 63, 64, 65, 77, 128, 199, 200)):
        found = run(form, case, dtype, checkpoint_offsets=torch.tensor([offset], dtype=index))
        shorter = run(form, part(case, 0, offset, case["initial_state"]), dtype)
        assert found.checkpoint_state is not None
        torch.testing.assert_close(found.checkpoint_state, shorter.final_state)
        assert error(found._replace(checkpoint_state=None), plain, case) < (SINGLE if dtype == torch.float32 else EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_neighbours_do_not_matter(form: Callable[..., Result]) -> None:
    lens = [70, 0, 1, 130, 8, 9, 64]
    case = make_case(lens)
    bounds = case["cu_seqlens"].tolist()
    together = run(form, case)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = run(form, part(case, start, end, case["initial_state"][n : n + 1]))
        mine = Result(together.out[:, start:end], together.final_state[n : n + 1], None)
        assert error(mine, alone, part(case, start, end, None)) < EXACT
        if start == end:
            continue
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            poisoned = case[name].clone()
            if name == "initial_state":
                poisoned[n] = math.nan
            else:
                poisoned[:, start:end] = math.nan
            others = run(form, {**case, name: poisoned})
            assert others.out[:, start:end].isnan().any()
            assert torch.equal(others.out[:, :start], together.out[:, :start])
            assert torch.equal(others.out[:, end:], together.out[:, end:])
            kept = torch.arange(len(lens)) != n
            assert torch.equal(others.final_state[kept], together.final_state[kept])


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_not_read_and_its_rows_are_zero(form: Callable[..., Result]) -> None:
    case = make_case([3, 0, 66], padding=7)
    clean = run(form, case)
    tokens = ("q", "k", "v", "g", "beta")
    poisoned = {name: case[name].clone() for name in tokens}
    for x in poisoned.values():
        x[:, 69:] = math.nan
    dirty = run(form, {**case, **poisoned})
    assert torch.equal(dirty.out, clean.out)
    assert torch.equal(dirty.final_state, clean.final_state)
    assert dirty.out.shape == (1, 76, 2, 12)
    assert torch.equal(dirty.out[:, 69:], torch.zeros(1, 7, 2, 12, dtype=torch.float64))
    short = run(form, {**case, **{name: case[name][:, :69] for name in tokens}})
    assert torch.equal(short.out, clean.out[:, :69])
    assert torch.equal(short.final_state, clean.final_state)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_any_strides_and_dtype_are_read_only(form: Callable[..., Result]) -> None:
    case = make_case([3, 70])
    expected = run(form, case, torch.float32)
    call = dict(case)
    for name in ("q", "k", "v", "g", "beta"):  # bfloat16 holds them
        call[name] = (
            call[name].bfloat16().repeat_interleave(2, dim=2)[:, :, ::2].expand(1, -1, -1, *case[name].shape[3:])
        )
    call["k"] = call["k"].mT.contiguous().mT
    call["initial_state"] = call["initial_state"].bfloat16().mT.contiguous().mT
    call["A_log"] = call["A_log"].view(1, 1, 2, 1)
    call["dt_bias"] = call["dt_bias"].view(2, 16)
    before = {name: x.clone() for name, x in call.items() if torch.is_tensor(x)}
    found = run(form, call, torch.float32)
    assert (found.out.dtype, found.final_state.dtype) == (torch.float32, torch.float32)
    assert error(found, expected, case) < 1e-6
    for name, x in before.items():
        assert torch.equal(call[name], x)


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_may_hold_nothing(form: Callable[..., Result]) -> None:
    for lens in ([], [0], [0, 0, 0]):
        for padding in (0, 4):
            case = make_case(lens, padding=padding)
            out, final_state, checkpoint_state = run(
                form, case, checkpoint_offsets=torch.zeros(len(lens), dtype=torch.int32)
            )
            assert torch.equal(out, torch.zeros(1, padding, 2, 12, dtype=torch.float64))
            assert torch.equal(final_state, case["initial_state"])
            assert checkpoint_state is not None
            assert torch.equal(checkpoint_state, final_state)


# ---- What is refused -------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank of q": ({"q": torch.zeros(7, 2, 16)}, r"q has shape \[7, 2, 16\], must be \[1, T, H, K\]"),
    "batch of q": ({"q": torch.zeros(2, 7, 2, 16)}, r"q has shape \[2, 7, 2, 16\]"),
    "k": ({"k": torch.zeros(1, 7, 2, 15)}, r"k has shape \[1, 7, 2, 15\], must be \[1, 7, 2, 16\]"),
    "v": ({"v": torch.zeros(1, 6, 2, 12)}, r"v has shape \[1, 6, 2, 12\], must be \[1, 7, 2, 12\]"),
    "rank of v": ({"v": torch.tensor(1.0)}, r"v has shape \[\], must be \[1, 7, 2, V\]"),
    "g": ({"g": torch.zeros(1, 7, 1, 16)}, r"g has shape .*, must be \[1, 7, 2, 16\]"),
    "beta": ({"beta": torch.zeros(1, 7, 2, 1)}, r"beta has shape .*, must be \[1, 7, 2\]"),
    "A_log": ({"A_log": torch.zeros(1)}, r"A_log has shape \[1\], must be \[2\] or \[1, 1, 2, 1\]"),
    "dt_bias": ({"dt_bias": torch.zeros(16)}, r"dt_bias has shape \[16\], must be \[32\] or \[2, 16\]"),
    "initial_state": ({"initial_state": torch.zeros(2, 2, 16, 12)}, r"initial_state has .*, must be \[2, 2, 12, 16\]"),
    "rank of cu_seqlens": ({"cu_seqlens": torch.tensor([[0, 3, 7]])}, r"cu_seqlens has shape \[1, 3\]"),
    "length of cu_seqlens": ({"cu_seqlens": torch.tensor([]).int()}, r"cu_seqlens has shape \[0\], must be \[N \+ 1\]"),
    "dtype of cu_seqlens": (
        {"cu_seqlens": torch.tensor([0.0, 3, 7])},
        "cu_seqlens is torch.float32, must be torch.int32",
    ),
    "start of cu_seqlens": ({"cu_seqlens": torch.tensor([1, 3, 7])}, r"cu_seqlens is \[1, 3, 7\], must be ascending"),
    "order of cu_seqlens": ({"cu_seqlens": torch.tensor([0, 4, 3])}, r"cu_seqlens is \[0, 4, 3\], must be ascending"),
    "end of cu_seqlens": ({"cu_seqlens": torch.tensor([0, 3, 8])}, "must be ascending from 0 to at most the 7 tokens"),
    "number of offsets": (
        {"checkpoint_offsets": torch.tensor([1])},
        r"checkpoint_offsets has shape \[1\], must be \[2\]",
    ),
    "dtype of offsets": ({"checkpoint_offsets": torch.zeros(2)}, "checkpoint_offsets is torch.float32"),
    "offset below 0": (
        {"checkpoint_offsets": torch.tensor([0, -1])},
        r"checkpoint_offsets is \[0, -1\], must be from 0",
    ),
    "offset above": ({"checkpoint_offsets": torch.tensor([0, 5])}, r"from 0 to the lengths \[3, 4\]"),
    "bound of 0": ({"lower_bound": 0.0}, "lower_bound is 0.0, must be finite and below 0, or None"),
    "bound of NaN": ({"lower_bound": math.nan}, "lower_bound is nan"),
    "infinite bound": ({"lower_bound": -math.inf}, "lower_bound is -inf"),
    "dtype": ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16, must be torch.float32 or torch.float64"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("form", FORMS)
def test_wrong_arguments_are_named(form: Callable[..., Result], bad: str) -> None:
    arguments, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        form(**{**make_case([3, 4]), **arguments})
