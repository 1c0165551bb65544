"""Thin typed wrappers around the kernels in ``csrc/`` and their torch equivalents."""
