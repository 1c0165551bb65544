"""KDA layers in the real engine give the tokens of a model that recomputes the whole text."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.support import kda_model
from tests.support.engine import IMPLEMENTATION, Run, prompts, run

TIE = 1e-4  # Between logits of some units; float32 errs by 1e-5 in them here.


def check(
    model: str,
    texts: list[str],
    *,
    backend: str | None = None,
    layer: str = "KimiGatedDeltaNetAttention",
    **settings: Any,
) -> Run:
    """Run the engine; each token must be the most likely after all before it, and our layers must have run.

    That is the text a full recomputation gives, token for token, but for a tie that float32 cannot see.
    """
    kda_model.register()
    ours = run(model, texts, backend=backend, max_tokens=32, **settings)
    assert ours.kda_layers == {f"Workspace{layer}: torch"}
    assert ours.kda_prefills > 0
    for tokens in ours.rounds:
        varied = sum(len(set(generated)) >= 10 for generated in tokens)
        assert varied >= 0.8 * len(texts), "too few distinct tokens to prove anything"
        for behind in kda_model.behind(model, ours.prompt_tokens, tokens):
            assert behind.max() < TIE
            assert (behind > 0).sum() <= 1
    return ours


@pytest.fixture(autouse=True)
def _without_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_plain(tmp_path: pathlib.Path, lower_bound: float | None) -> None:
    check(kda_model.write(tmp_path, lower_bound=lower_bound), prompts(6, 100))


@pytest.fixture(params=["kkk", "kaka"], ids=["kda", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[str, str | None]:
    """A model of KDA layers, or of KDA and attention layers, and the backend for it."""
    return kda_model.write(tmp_path, request.param, lower_bound=-5.0), "CUSTOM" if "a" in request.param else None


def test_both_kinds_of_layers(tmp_path: pathlib.Path) -> None:
    ours = check(kda_model.write(tmp_path, "kaka"), prompts(6, 100), backend="CUSTOM")
    assert ours.implementations == {IMPLEMENTATION}
    assert ours.gathers > 0


def test_chunked_prefill(model: tuple[str, str | None]) -> None:
    ours = check(model[0], prompts(6, 200, shortest=100), backend=model[1], max_num_batched_tokens=48, max_num_seqs=8)
    assert ours.kda_prefills > 20


def test_prefix_cache_hits(model: tuple[str, str | None]) -> None:
    shared = prompts(1, 200, seed=7, shortest=200)[0]
    texts = [shared + tail for tail in prompts(6, 60, seed=8)]
    ours = check(model[0], texts, backend=model[1], rounds=2, block_size=32)
    assert ours.cached_tokens[1] > 0


def test_many_requests(model: tuple[str, str | None]) -> None:
    check(model[0], prompts(32, 60), backend=model[1], max_num_seqs=32)


def test_preemption(model: tuple[str, str | None]) -> None:
    few: dict[str, Any] = {"num_gpu_blocks_override": 7 if model[1] is None else 20, "block_size": 32}
    ours = check(model[0], prompts(6, 160, shortest=100), backend=model[1], **few)
    assert ours.preemptions > 0


K3 = "KimiK3DeltaAttention"


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("chunk", [None, 48], ids=["whole", "chunked"])
def test_kimi_k3_layer(tmp_path: pathlib.Path, chunk: int | None, lower_bound: float | None) -> None:
    path = kda_model.write(tmp_path, "kkk", lower_bound=lower_bound, kda_layer=K3)
    settings: dict[str, Any] = {} if chunk is None else {"max_num_batched_tokens": chunk, "max_num_seqs": 8}
    check(path, prompts(6, 150), layer=K3, **settings)


def test_kimi_k3_layer_with_prefix_cache_hits(tmp_path: pathlib.Path) -> None:
    path = kda_model.write(tmp_path, "kaka", lower_bound=-5.0, kda_layer=K3)
    shared = prompts(1, 200, seed=7, shortest=200)[0]
    texts = [shared + tail for tail in prompts(6, 60, seed=8)]
    ours = check(path, texts, layer=K3, backend="CUSTOM", rounds=2, block_size=32)
    assert ours.cached_tokens[1] > 0


def test_the_workspace_is_large_enough_once_locked(tmp_path: pathlib.Path) -> None:
    """The longest step and the most sequences at once run, with no growth allowed after the start."""
    ours = check(
        kda_model.write(tmp_path),
        prompts(32, 40, shortest=20) + prompts(1, 400, shortest=400),
        max_num_batched_tokens=256,
        max_num_seqs=32,
        locked=True,
    )
    assert ours.kda_prefills > 1


def test_an_impossible_prefill_is_refused_at_the_start(tmp_path: pathlib.Path) -> None:
    kda_model.register()
    with pytest.raises(ValueError, match=r"kda_plugin.prefill = flashkda cannot run this layer: it needs a GPU"):
        run(
            kda_model.write(tmp_path),
            ["a"],
            backend=None,
            additional_config={"kda_plugin": {"prefill": "flashkda"}},
        )


def test_bailing_v3_layer(tmp_path: pathlib.Path) -> None:
    layer = "BailingMoeV3KimiDeltaAttention"
    path = kda_model.write(tmp_path, "kak", lower_bound=-5.0, kda_layer=layer)
    check(
        path, prompts(6, 150), layer=layer, backend="CUSTOM", block_size=32, max_num_batched_tokens=48, max_num_seqs=8
    )
