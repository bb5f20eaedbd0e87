# The verbs of this project. `make` alone prints them.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 7860
# Test files at a time; those that watch the whole page in a browser have the machine for themselves, and another try.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Stamps live inside the environment, so that removing .venv forgets them too.
READY := $(VENV)/.requirements-installed
DEV_READY := $(VENV)/.requirements-dev-installed
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' 2>/dev/null)

export HF_HUB_DISABLE_TELEMETRY := 1
export GRADIO_ANALYTICS_ENABLED := False
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup setup-dev demo test check kernels bench bench-kernels clean
.DEFAULT_GOAL := help

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv and install what the app needs

setup-dev: $(DEV_READY)  ## setup, and the tools for tests and checks

demo: $(READY)  ## open the dashboard at http://127.0.0.1:7860 (HOST=... PORT=...)
	$(BIN)/python app.py --host $(HOST) --port $(PORT)

test: $(DEV_READY)  ## run all tests; those that drive a browser need Chromium
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| echo "No Chromium here: the end-to-end tests will be skipped (apt-get install chromium)."
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --ignore=tests/e2e
	$(BIN)/python -m pytest tests/e2e --reruns 2 --tb=native

check: $(DEV_READY)  ## lint, formatting (Python and C++) and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
ifneq ($(CXX_FILES),)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
endif

kernels: $(READY)  ## compile the C++ kernels for this machine, and say what it can do
	$(BIN)/python -m engine doctor

bench: $(READY)  ## measure decoding with and without speculation and kernels on this machine
	$(BIN)/python -m engine bench --suite decode

bench-kernels: $(READY)  ## measure each kernel against torch and the memory's bandwidth
	$(BIN)/python -m engine bench --suite kernels

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info test-results .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "SpecViz needs Python 3.10 or newer, and there is no $(PYTHON) here."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "SpecViz needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d ' ' -f 2)." \
			"Name another with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot create virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(READY): requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -r requirements.txt
	@touch $@

$(DEV_READY): requirements-dev.txt $(READY)
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	@touch $@
