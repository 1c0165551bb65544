"""The watch that tests on a GPU set on every KDA prefill of an engine: on the CPU it sees what is right, and is shown
what is wrong."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import kda_model
from tests.support.engine import Run, prompts, run
from tests.support.kda_watch import Watch
from vllm_kda_plugin.kda import layers


@pytest.fixture(autouse=True)
def _without_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")


def generate(tmp_path: pathlib.Path, watch: Watch) -> Run:
    """A hybrid model, its prompts in chunks beside others' decodes."""
    kda_model.register()
    model = kda_model.write(tmp_path, "kaka", lower_bound=-5.0)
    texts = prompts(6, 200, shortest=100)
    with watch.watching():
        return run(model, texts, backend="CUSTOM", max_tokens=8, max_num_batched_tokens=48, max_num_seqs=8)


def test_every_call_is_right(tmp_path: pathlib.Path) -> None:
    watch = Watch(1e-4)
    ours = generate(tmp_path, watch)
    watch.check()
    assert watch.calls >= 2 * ours.kda_prefills > 40
    assert watch.continued > 40
    assert set(watch.worst) == {"output", "final state", "row of the pool"}


def _spoils_a_row(call: Callable[..., Any], **args: Any) -> Any:
    result = call(**args)
    args["initial_state"][args["state_indices"][-1]] *= 1.1
    return result


def _starts_from_zeros(call: Callable[..., Any], **args: Any) -> Any:
    return call(**args | {"has_initial_state": torch.zeros_like(args["has_initial_state"])})


def _takes_a_neighbours_row(call: Callable[..., Any], **args: Any) -> Any:
    return call(**args | {"state_indices": args["state_indices"].roll(1)})


def _spoils_a_head(call: Callable[..., Any], **args: Any) -> Any:
    result = call(**args)
    args["out"][:, -1, 0] = 0
    return result


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoils_a_row, "row of the pool errs"),
        (_starts_from_zeros, "output errs"),
        (_takes_a_neighbours_row, "row of the pool errs"),
        (_spoils_a_head, "output errs"),
    ],
)
def test_once_wrong_is_seen(
    spoil: Callable[..., Any], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of a kernel that computes in bfloat16 too."""
    right, calls = layers.kda_prefill, 0
    names = list(inspect.signature(right).parameters)

    def wrong(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        args = dict(zip(names, given, strict=False)) | named
        return spoil(right, **args) if calls == 30 else right(**args)

    monkeypatch.setattr(layers, "kda_prefill", wrong)
    watch = Watch(1e-2)
    generate(tmp_path, watch)
    with pytest.raises(AssertionError, match=message):
        watch.check()
