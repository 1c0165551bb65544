"""vLLM plugin for long prompts: gather-then-FlashAttention and Kimi Delta Attention prefill."""

__version__ = "0.1.0"
