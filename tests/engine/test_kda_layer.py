"""One replaced KDA layer: speculative tokens go to the stock class, the rest is ours; the workspace's limits."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kda_plugin.kda.providers import PROVIDERS
from vllm_kda_plugin.kda.workspace import KdaWorkspace

HEADS, DIM, WIDTH, ROWS = 2, 16, 4, 9
TORCH = PROVIDERS["torch"]


@pytest.fixture(autouse=True)
def _fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.v1.worker.workspace import reset_workspace_manager

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does
    reset_workspace_manager()
    yield
    reset_workspace_manager()


def workspace(max_tokens: int = 64, max_sequences: int = 8) -> KdaWorkspace:
    return KdaWorkspace(max_tokens, max_sequences, HEADS, DIM, torch.float32, torch.float32, TORCH)


def test_buffers_are_contiguous_aligned_and_apart() -> None:
    buffers = workspace().take(10, 3, final_state=True, out=True, checkpoint=True)
    assert buffers.out is not None
    assert buffers.final_state is not None
    assert buffers.checkpoint_state is not None
    assert buffers.out.shape == (1, 10, HEADS, DIM)
    assert buffers.final_state.shape == buffers.checkpoint_state.shape == (3, HEADS, DIM, DIM)
    tensors = [x for x in buffers if x is not None]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.itemsize) for x in tensors)
    assert all(x.is_contiguous() and x.data_ptr() % 64 == 0 for x in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("heads", [1, 3, 12])
@pytest.mark.parametrize("dim", [24, 128])
def test_slices_start_256_bytes_apart_whatever_their_sizes(heads: int, dim: int) -> None:
    layer = KdaWorkspace(613, 3, heads, dim, torch.bfloat16, torch.bfloat16, TORCH)
    layer.reserve(checkpoint=True)
    for num_tokens, num_sequences in itertools.product((1, 2, 17, 613), (1, 3)):
        buffers = layer.take(num_tokens, num_sequences, final_state=True, out=True, checkpoint=True)
        starts = [x.data_ptr() for x in buffers if x is not None]
        assert len(starts) == 4
        assert all((start - starts[0]) % 256 == 0 for start in starts)


def test_columns_of_one_tensor_are_not_copied() -> None:
    from vllm_kda_plugin.kda.layers import _side_by_side

    wide = torch.randn(7, 20)
    for parts in (wide[:, 2:14].chunk(3, 1), wide[3:4, 2:14].chunk(3, 1), wide[:0, :12].chunk(3, 1)):
        assert torch.equal(_side_by_side(parts), torch.cat(parts, -1))
        assert _side_by_side(parts).data_ptr() == parts[0].data_ptr()
    apart = wide[:, :4], wide[:, 8:12], wide[:, 4:8]
    assert torch.equal(_side_by_side(apart), torch.cat(apart, -1))
    others = tuple(part.clone() for part in wide[:, :12].chunk(3, 1))
    assert torch.equal(_side_by_side(others), torch.cat(others, -1))


def test_any_allowed_step_fits_once_locked() -> None:
    from vllm.v1.worker.workspace import current_workspace_manager, lock_workspace

    layer = workspace()
    layer.reserve(checkpoint=True)
    lock_workspace()
    for num_tokens in (0, 1, 17, 64):
        for num_sequences in (0, 1, 8):
            for wanted in (False, True):
                layer.take(num_tokens, num_sequences, final_state=wanted, out=wanted, checkpoint=wanted)
    with pytest.raises(AssertionError, match="locked"):
        current_workspace_manager().get_simultaneous(((1 << 24,), torch.uint8))


def test_no_states_are_reserved_for_a_kernel_that_writes_the_pool_itself() -> None:
    from vllm.v1.worker.workspace import lock_workspace

    layer = dataclasses.replace(workspace(), max_sequences=4096, provider=PROVIDERS["native"])
    layer.reserve(checkpoint=False)
    lock_workspace()
    assert layer.take(64, 4096, final_state=False, out=True, checkpoint=False).final_state is None
    with pytest.raises(AssertionError, match="locked"):
        layer.take(64, 4096, final_state=True, out=True, checkpoint=False)


@pytest.mark.parametrize("step", [(65, 1), (1, 9), (-1, 0)])
def test_a_larger_step_is_refused(step: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be at most 64 tokens \(--max-num-batched-tokens\) in 8 sequences"):
        workspace().take(*step, final_state=True, out=True, checkpoint=True)


@dataclasses.dataclass
class Metadata:
    """What a layer reads of the metadata of a batch."""

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: torch.Tensor | None = None
    non_spec_query_start_loc: torch.Tensor | None = None
    non_spec_state_indices_tensor: torch.Tensor | None = None
    spec_token_indx: torch.Tensor | None = None
    non_spec_token_indx: torch.Tensor | None = None
    checkpoint: Any = None


class Stock:
    """In the place of vLLM's class: remembers what it was shown, and answers with a number."""

    prefix = "layers.0"
    head_dim, local_num_heads = DIM, HEADS
    gate_lower_bound = -5.0

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.A_log, self.dt_bias = draw(HEADS), draw(HEADS * DIM)
        self.conv1d = SimpleNamespace(weight=draw(3 * HEADS * DIM, 1, WIDTH))
        self.kv_cache = (draw(ROWS, WIDTH - 1, 3 * HEADS * DIM), draw(ROWS, HEADS, DIM, DIM))
        self.calls: list[tuple[Any, dict[str, torch.Tensor]]] = []

    def o_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate.sigmoid()

    def _forward(self, **tensors: torch.Tensor) -> None:
        from vllm.forward_context import get_forward_context

        self.calls.append((get_forward_context().attn_metadata[self.prefix], tensors))
        tensors["core_attn_out"].fill_(7.0)


def make_layer(monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any] | None, *, on_cpu: bool = False) -> Any:
    """Our Kimi layer over :class:`Stock`, in the middle of a step."""
    import vllm.forward_context

    from vllm_kda_plugin.kda import layers

    ours: Any = layers.REPLACEMENTS["KimiGatedDeltaNetAttention"]

    class Layer(ours, Stock):
        def __init__(self) -> None:
            Stock.__init__(self)
            self.on_cpu, self.bound, self.provider, self.workspace = on_cpu, -5.0, TORCH, workspace()

        def _convolve(self, m: Any, qkv: Any, *rest: Any) -> Any:
            self.on_cpu = True  # the convolution of the CPU
            try:
                return super()._convolve(m, qkv, *rest)
            finally:
                self.on_cpu = on_cpu

    monkeypatch.setattr(layers, "get_forward_context", vllm.forward_context.get_forward_context)
    context = SimpleNamespace(attn_metadata=metadata)
    monkeypatch.setattr(vllm.forward_context, "_forward_context", context)
    return Layer()


def inputs(num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "mixed_qkv": draw(num_tokens, 3 * HEADS * DIM),
        "g1": draw(1, num_tokens, HEADS, DIM),
        "g2": draw(num_tokens, HEADS, DIM),
        "beta": draw(1, num_tokens, HEADS),
        "core_attn_out": torch.full((1, num_tokens, HEADS, DIM), 3.0),
    }


def prefill_of(lens: list[int], rows: list[int], known: list[bool], **more: Any) -> Metadata:
    return Metadata(
        num_prefills=len(lens),
        num_prefill_tokens=sum(lens),
        num_decodes=0,
        num_decode_tokens=0,
        has_initial_state=torch.tensor(known),
        non_spec_query_start_loc=torch.tensor([0, *lens]).cumsum(0).int(),
        non_spec_state_indices_tensor=torch.tensor(rows).int(),
        **{"num_spec_decodes": 0, "num_spec_decode_tokens": 0, "num_actual_tokens": sum(lens), **more},
    )


def test_a_profile_run_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.workspace import lock_workspace

    layer = make_layer(monkeypatch, None)
    layer._forward(**inputs(4))
    lock_workspace()
    layer.workspace.take(64, 8, final_state=True, out=True, checkpoint=False)  # on the CPU no layer takes checkpoints


def test_rows_of_a_wide_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with speculation, before any speculative token."""
    m = prefill_of([5, 1], [4, 6], [False, True])
    wide = torch.full((2, 4), -1, dtype=torch.int32)
    wide[:, 0] = m.non_spec_state_indices_tensor
    m.non_spec_state_indices_tensor = wide[:, 0]
    layer, given = make_layer(monkeypatch, {"layers.0": m}), inputs(6)
    layer._forward(**given)
    assert layer.prefills == 1
    assert bool(given["core_attn_out"].isfinite().all())


def test_padding_is_normalised_too(monkeypatch: pytest.MonkeyPatch) -> None:
    m = prefill_of([5, 1], [4, 6], [False, True], num_actual_tokens=6)
    layer, given = make_layer(monkeypatch, {"layers.0": m}), inputs(8)
    given["core_attn_out"][:, 6:] = 1e30
    layer._forward(**given)
    assert not bool((given["core_attn_out"][:, 6:] == 1e30).any())


def test_decodes_are_the_stock_layer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Metadata(0, 0, 3, 3, 0, 0, 3)
    layer, given = make_layer(monkeypatch, {"layers.0": m}), inputs(4)
    layer._forward(**given)
    ((seen, tensors),) = layer.calls
    assert seen is m
    assert all(tensors[name] is given[name] for name in given)
    assert layer.prefills == 0


def test_a_layer_that_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given = make_layer(monkeypatch, {"layers.0": prefill_of([5, 1], [4, 6], [False, True])}), inputs(6)
    layer.is_stock = True
    layer._forward(**given)
    assert len(layer.calls) == 1
    assert layer.prefills == 0


@pytest.mark.parametrize(("theirs", "told"), [("triton", True), ("torch", False), ("auto", False)])
def test_vllms_own_setting_is_not_overridden_in_silence(
    theirs: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from vllm_kda_plugin.kda import layers

    said: list[tuple[object, ...]] = []
    monkeypatch.setattr(layers.logger, "warning_once", lambda *words: said.append(words))
    config: Any = SimpleNamespace(additional_config={"kda_prefill_backend": theirs})
    layers._tell_if_overridden(config, "torch")
    assert bool(said) is told


@pytest.mark.parametrize(
    ("theirs", "missing", "loads", "taken", "told"),
    [
        ("auto", None, True, True, False),
        ("triton", None, True, False, False),
        ("auto", None, False, False, True),
        ("auto", "cupy is not installed", True, False, True),
    ],
)
def test_auto_leaves_the_layer_to_vllm_where_ours_is_not_wanted_or_cannot_be_loaded(
    theirs: str, missing: str | None, loads: bool, taken: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kda_plugin.kda import layers, providers
    from vllm_kda_plugin.kda.providers import Case
    from vllm_kda_plugin.kernels.loader import KernelUnavailable

    def load(device: torch.device) -> None:
        if not loads:
            raise KernelUnavailable("nothing compiles here")

    said: list[tuple[object, ...]] = []
    monkeypatch.setattr(layers.logger, "warning_once", lambda *words: said.append(words))
    monkeypatch.setattr(layers.kda_native, "load", load)
    monkeypatch.setattr(providers, "_missing", lambda module: missing)
    config: Any = SimpleNamespace(additional_config={"kda_prefill_backend": theirs})
    case = Case("cuda", (9, 0), 128, torch.bfloat16, torch.float32, -5.0)
    found = layers._automatic(config, case, "NVIDIA H200")
    assert found is (PROVIDERS["native"] if taken else None)
    assert bool(said) is told
    assert layers._automatic(config, case, "NVIDIA H100") is None


def test_compiled_models_are_told_apart_by_the_kernels() -> None:
    from vllm_kda_plugin.kda.layers import _hash_with_the_model

    config: Any = SimpleNamespace(additional_config={"kda_plugin": {"prefill": "auto"}})
    _hash_with_the_model(config, "native")
    assert config.additional_config == {"kda_plugin": {"prefill": "auto"}, "kda_plugin_prefill": "native"}


def test_what_a_step_s_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is made once, for vLLM's Triton kernels know lengths by the tensor; a copy of the metadata has its own."""
    from vllm_kda_plugin.kda.layers import _step

    m = prefill_of([5, 1, 0], [4, 6, 0], [False, True, False])
    m.num_prefills = 2
    step = _step(m)
    assert step.cu_seqlens.tolist() == [0, 5, 6]
    assert _step(m).cu_seqlens is step.cu_seqlens
    other = copy.copy(m)
    other.non_spec_state_indices_tensor = torch.tensor([7, 8, 0]).int()
    assert _step(other).state_indices.tolist() == [7, 8]
    assert _step(m) is step


def test_padding_of_a_prefill_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # One more row of the batch is padding too: its row of the pool may belong to somebody.
    m = prefill_of([5, 2], [4, 6, 8], [False, True, False], num_actual_tokens=7)
    m.num_prefills = 2
    m.non_spec_query_start_loc = torch.tensor([0, 5, 7, 7]).int()
    layer, given = make_layer(monkeypatch, {"layers.0": m}), inputs(10)
    for name in ("mixed_qkv", "g1", "g2", "beta"):
        (given[name][7:] if given[name].shape[0] == 10 else given[name][:, 7:]).fill_(float("nan"))
    held = [state[8].clone() for state in layer.kv_cache]
    layer._forward(**given)
    assert bool(given["core_attn_out"][:, :7].isfinite().all())
    assert all(torch.equal(state[8], before) for state, before in zip(layer.kv_cache, held, strict=True))
    assert layer.prefills == 1
    assert layer.calls == []


def test_speculative_tokens_beside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch without them gives, at the same tokens; the stock layer sees them alone."""
    spec, rest = [0, 1, 7, 8], [2, 3, 4, 5, 6, 9]
    m = prefill_of(
        [5, 1],
        [4, 6],
        [False, True],
        num_spec_decodes=2,
        num_spec_decode_tokens=4,
        num_actual_tokens=10,
        spec_token_indx=torch.tensor(spec),
        non_spec_token_indx=torch.tensor(rest),
    )
    layer, given = make_layer(monkeypatch, {"layers.0": m}), inputs(10)
    layer._forward(**given)
    alone = make_layer(monkeypatch, {"layers.0": prefill_of([5, 1], [4, 6], [False, True])})
    whole = inputs(10)
    part = {name: x[rest] if x.shape[0] == 10 else x[:, rest] for name, x in whole.items()}
    alone._forward(**part)
    assert torch.equal(given["core_attn_out"][:, rest], part["core_attn_out"])
    assert bool((given["core_attn_out"][:, spec] == 7).all())
    for state, wanted in zip(layer.kv_cache, alone.kv_cache, strict=True):
        assert torch.equal(state, wanted)
    ((seen, tensors),) = layer.calls
    assert (seen.num_prefills, seen.num_decodes, seen.num_actual_tokens) == (0, 0, 4)
    assert len(seen.non_spec_token_indx) == 0  # by which GLM-5.3-Flash's layer knows that all are speculative
    assert m.num_prefills == 2
    for name in ("mixed_qkv", "g2"):
        assert torch.equal(tensors[name], whole[name][spec])
    for name in ("g1", "beta"):
        assert torch.equal(tensors[name], whole[name][:, spec])


class Taking(Stock):
    """In the place of vLLM's class, which asks for no checkpoints of its own."""

    conv_size = WIDTH

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        from vllm.v1.kv_cache_interface import MambaSpec

        return MambaSpec(shapes=((1,),), dtypes=(torch.float32,), block_size=16)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        return None


@pytest.mark.parametrize(
    ("kernel", "is_stock", "step"), [("native", False, 16), ("triton", False, None), ("", True, None)]
)
def test_checkpoints_are_asked_for_where_our_kernel_takes_them(kernel: str, is_stock: bool, step: int | None) -> None:
    """Of Kimi-Linear too, whose class in vLLM takes none."""
    from vllm_kda_plugin.kda import layers

    ours: Any = layers.REPLACEMENTS["KimiGatedDeltaNetAttention"]

    class Layer(ours, Taking):
        def __init__(self) -> None:
            Taking.__init__(self)
            self.on_cpu, self.is_stock = False, is_stock
            if not is_stock:
                self.provider = PROVIDERS[kernel]
            self.decide_checkpoints()

    layer = Layer()
    spec = layer.get_kv_cache_spec(None)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (int(step is not None), step)
    assert layer.get_prefill_checkpoint_alignment() == step
    exporter = getattr(layer, "_checkpoint_exporter", None)
    assert (exporter is not None) == (step is not None)
    assert exporter is None or exporter.state_len == WIDTH - 1
    assert not hasattr(layer, "kda_prefill_backend")


def test_a_step_knows_its_longest_sequence() -> None:
    from vllm_kda_plugin.kda.layers import _max_seqlen

    blocks = {8: {"nums": torch.tensor([1, 1025, 0])}}
    assert _max_seqlen(SimpleNamespace(nums_dict=blocks)) == 8200
    assert _max_seqlen(SimpleNamespace(nums_dict=None)) is None
    assert _max_seqlen(SimpleNamespace()) is None
