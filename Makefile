# Each target works as the first command in a clean clone: the environment is made, or completed, as needed.
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test lint clean

demo: ## serve a small model through the plugin
	$(PYTHON) -m vllm_kda_plugin.environment $(VENV)
	$(VENV)/bin/vllm-kda demo

test: lint ## lint, then every test
	$(VENV)/bin/python -m pytest --durations=15

lint:
	$(PYTHON) -m vllm_kda_plugin.environment $(VENV) --extra test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Not the environment itself, only its note that this checkout's kernels are compiled.
clean: ## remove what builds and tests leave
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf vllm_kda_plugin/kernels/fatbin vllm_kda_plugin/kernels/csrc
	rm -f $(VENV)/vllm-kda-plugin.json
	find vllm_kda_plugin tests -name __pycache__ -prune -exec rm -rf {} +
