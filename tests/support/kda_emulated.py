"""Our KDA prefill kernel without a GPU: compiled by g++ against ``emulated_gpu.h`` and run thread by thread."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from vllm_kda_plugin.kda.providers import Call, Case
from vllm_kda_plugin.kernels import kda_native
from vllm_kda_plugin.kernels.kda_native import Schedule, Tensors

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled once a process; the test is skipped without g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "kernels.so")
        header = ROOT / "tests" / "support" / "emulated_gpu.h"
        source = ROOT / "csrc" / f"{kda_native.KERNEL}.cu"
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
        command = [compiler, *flags, "-include", str(header), "-x", "c++", str(source), "-o", str(built)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(built))


class EmulatedProvider:
    """The provider ``native`` on the CPU: as if an H200 ran it, or with a cut of our own."""

    name = "native"
    strided_heads = True
    dense_inputs = False
    pools = True
    alignment = 16
    checkpoint_step = kda_native.CHUNK

    def __init__(self, cut: Schedule | None = None, seed: int = 0) -> None:
        self.cut, self.seed = cut, seed

    def why_not(self, case: Case) -> str | None:
        """It takes all that tests ask of it."""
        return None

    def scratch_bytes(self, num_tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
        """As the real one."""
        return kda_native.workspace_bytes(num_tokens, num_heads)

    def run(self, call: Call) -> None:
        """Every kernel of the call, a block after another."""
        num_sequences, (num_tokens, num_heads) = len(call.cu_seqlens) - 1, call.q.shape[1:3]
        cut = self.cut or kda_native.schedule(
            num_tokens,
            num_sequences,
            num_heads,
            132,
            max_seqlen=call.max_seqlen,
            bounded=call.lower_bound is not None,
        )
        cut = cut._replace(slots=num_tokens // cut.segment_tokens) if cut.segment_tokens else cut
        workspace = torch.full((cut.workspace_bytes(num_heads) + 16,), 0xFF, dtype=torch.uint8)  # NaN
        tensors = Tensors(
            *(call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens),
            *(call.out, call.final_state, call.initial_state, call.state_indices, call.has_initial_state),
            *(call.checkpoint_state, call.checkpoint_offsets),
        )
        words = [
            *tensors.pointers(workspace.data_ptr(), workspace.data_ptr() + cut.workspace_bytes(num_heads) // 2),
            *tensors.constants(call.lower_bound, cut),
        ]
        struct = (ctypes.c_longlong * len(words))(*words)
        for step in kda_native.steps(cut, num_sequences, num_heads, call.lower_bound is not None):
            entry = ctypes.cast(getattr(library(), step.entry), ctypes.c_void_p)
            blocks, seed = ctypes.c_uint(step.blocks), ctypes.c_uint(self.seed)
            library().emulated_launch(entry, blocks, step.threads, struct, len(words), seed)
