"""Which kernel runs a KDA layer, and what is said when the chosen one cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from tests.support.kda_calls import arguments, expected
from vllm_kda_plugin.kda import providers
from vllm_kda_plugin.kda.providers import PROVIDERS, Call, Case, select
from vllm_kda_plugin.kda.reference import chunked

CPU = Case("cpu", None, 128, torch.float32, torch.float32, -5.0)
HOPPER = Case("cuda", (9, 0), 128, torch.bfloat16, torch.float32, -5.0)


@pytest.fixture(autouse=True)
def _everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_missing", lambda module: None)


def test_the_cpu_has_torch() -> None:
    assert select("auto", CPU).name == "torch"
    assert select("torch", CPU).name == "torch"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "flashkda"),
        ({"state_dtype": torch.bfloat16}, "flashkda"),
        ({"capability": (12, 1)}, "flashkda"),
        ({"lower_bound": None}, "triton"),
        ({"lower_bound": -6.0}, "triton"),
        ({"capability": (8, 0)}, "triton"),
        ({"head_dim": 64}, "triton"),
        ({"dtype": torch.float16}, "triton"),
        ({"dtype": torch.float32}, "torch"),
    ],
)
def test_the_best_that_can(changes: dict[str, Any], wanted: str) -> None:
    case = dataclasses.replace(HOPPER, **changes)
    assert select("auto", case).name == wanted
    assert select(wanted, case).name == wanted


@pytest.mark.parametrize(
    ("choice", "case", "message"),
    [
        ("flashkda", CPU, r"prefill = flashkda cannot run this layer: it needs a GPU.*; allowed here are auto, torch$"),
        ("triton", CPU, r"prefill = triton cannot run this layer: it needs a GPU, this layer is on cpu"),
        ("native", dataclasses.replace(HOPPER, capability=(10, 0)), "needs compute capability 9.0, this GPU has 10.0"),
        ("native", dataclasses.replace(HOPPER, lower_bound=-6.0), r"a lower bound in \[-5.0, 0\), this layer's is -6"),
        ("native", CPU, r"it needs a GPU, this layer is on cpu; allowed here are auto, torch$"),
        ("flashkda", dataclasses.replace(HOPPER, lower_bound=None), "the bounded gate only, this layer's is softplus"),
        (
            "flashkda",
            dataclasses.replace(HOPPER, lower_bound=-6.0),
            r"a lower bound in \[-5.0, 0\), this layer's is -6",
        ),
        ("flashkda", dataclasses.replace(HOPPER, head_dim=64), "heads of 128, this layer's are 64"),
        ("flashkda", dataclasses.replace(HOPPER, capability=(8, 9)), "capability 9, 10 or 12, this GPU has 8.9"),
        ("flashkda", dataclasses.replace(HOPPER, dtype=torch.float16), "dtype of torch.bfloat16, .* is torch.float16"),
        ("torch", dataclasses.replace(CPU, dtype=torch.float64), "needs a dtype of .*, this layer's is torch.float64"),
    ],
)
def test_an_impossible_choice_is_refused(choice: str, case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(choice, case)


def test_nothing_can() -> None:
    with pytest.raises(ValueError, match=r"^no KDA prefill can run this layer: flashkda: .*; triton: .*; torch: "):
        select("auto", dataclasses.replace(CPU, dtype=torch.float64))


def test_a_missing_kernel_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    providers._missing.cache_clear()
    with pytest.raises(ValueError, match=r"vllm\._flashkda_C cannot be imported"):
        select("flashkda", HOPPER)
    assert select("auto", HOPPER).name == "torch"
    providers._missing.cache_clear()


def test_settings_and_kernels_have_the_same_names() -> None:
    assert list(PROVIDERS) == ["flashkda", "triton", "torch", "native"]


def test_native_is_taken_only_by_name() -> None:
    for lower_bound in (-5.0, None):
        case = dataclasses.replace(HOPPER, lower_bound=lower_bound)
        assert select("native", case).name == "native"
        assert select("auto", case).name != "native"


def test_an_installed_flashkda_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no checkpoints, and int64 lengths."""
    given: list[Any] = []
    package: Any = types.ModuleType("flash_kda_C")
    package.fwd, package.get_workspace_size = lambda *tensors: given.append(tensors), lambda *sizes: sum(sizes)
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    providers._missing.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_kda_C", package)
    providers.flashkda.cache_clear()
    provider = select("auto", HOPPER)
    try:
        assert provider.name == "flashkda"
        assert provider.checkpoint_step == 0
        assert provider.scratch_bytes(1000, 20, 3, 128) == 1023
        x = torch.zeros(1, 4, 2, 128)
        state, A_log, lens = torch.zeros(1, 2, 128, 128), torch.zeros(1, 1, 2, 1), torch.tensor([0, 4]).int()
        beta, dt_bias, scratch = torch.zeros(1, 4, 6)[..., :2], torch.zeros(256), torch.zeros(8)
        provider.run(Call(x, x, x, x, beta, A_log, dt_bias, -5.0, None, lens, x, state, scratch, None, None))
    finally:
        providers.flashkda.cache_clear()
        providers._flashkda_scratch_bytes.cache_clear()
    (tensors,) = given
    assert len(tensors) == 14
    assert tensors[4].is_contiguous()
    assert tensors[8].shape == (2,)
    assert tensors[9].shape == (2, 128)
    assert tensors[13].dtype == torch.int64


@pytest.fixture
def fake_triton(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Puts the reference in the place of vLLM's kernels; the ``cu_seqlens`` that they were given."""
    seen: list[torch.Tensor] = []

    def chunk_kda_with_fused_gate(**a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(a["cu_seqlens"])
        inputs = (a["q"], a["k"], a["v"], a["raw_g"], a["raw_beta"], a["A_log"], a["g_bias"], a["lower_bound"])
        result = chunked(*inputs, a["initial_state"], a["cu_seqlens"])
        a["out"].copy_(result.out)
        return a["out"], result.final_state.float()

    kda: Any = types.ModuleType("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
    kda.chunk_kda_with_fused_gate = chunk_kda_with_fused_gate
    sync: Any = types.ModuleType("vllm.utils.gpu_sync_debug")
    sync.gpu_sync_allowed = contextlib.nullcontext
    for module in (kda, sync):
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    for module in (kda, sync):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


@pytest.mark.parametrize("initial", [True, False], ids=["from states", "from zeros"])
@pytest.mark.parametrize("lens", [(5, 9), (5, 0, 0, 9, 0), (0, 70), (0, 0)], ids=str)
def test_vllms_triton_is_given_no_empty_sequence(
    fake_triton: list[torch.Tensor], lens: tuple[int, ...], initial: bool
) -> None:
    """It would take the sequence after an empty one for that."""
    args = arguments(PROVIDERS["triton"], lens, 2, 16, state_dtype=torch.bfloat16, padding=not any(lens))
    if not initial:
        args["initial_state"] = None
    wanted = expected(args, args["initial_state"])
    call = Call(**{name: args.get(name) for name in Call._fields if name != "scratch"}, scratch=args["workspace"])
    PROVIDERS["triton"].run(call)
    PROVIDERS["triton"].run(call)
    assert all(bool((seen.diff() > 0).all()) for seen in fake_triton)
    assert len({id(seen) for seen in fake_triton}) == any(lens), "the kernels remember a tensor for a step's layers"
    torch.testing.assert_close(args["out"][:, : sum(lens)], wanted.out[:, : sum(lens)])
    torch.testing.assert_close(args["final_state"], wanted.final_state.bfloat16())
