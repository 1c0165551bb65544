"""The benchmarks behind ``vllm-kda bench``."""
