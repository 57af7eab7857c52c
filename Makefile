# `make demo` and `make test` are all that a fresh machine with Python 3.11+ needs: each makes its own environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := pyproject.toml constraints.txt tools/install.sh
# The Python that runs the GPU tests and benchmarks: set it if an environment with CUDA exists already.
GPU_PYTHON ?= $(BIN)/python

.PHONY: demo test test-all check check-examples test-gpu test-gpu-all test-browser bench numbers docs clean

demo: $(VENV)/.for-demo
	$(BIN)/onchip demo --out build/demo

# The examples of a page share their names, so a file stays on one worker; in order, so that short files come last.
# One thread each: workers whose threads wait for each other on the same cores took up to 10 times as long.
# Python keeps what it compiled, also where the environment forbids it: dozens of processes import the same modules.
test: $(VENV)/.for-dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# With the variants that `make test` leaves out; takes about as long again.
test-all: $(VENV)/.for-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu and not browser' -n auto --dist loadfile --no-loadscope-reorder

# Which modules import which, and that pages show what results/ holds, are tests: test_architecture.py, test_measured.py.
check: $(VENV)/.for-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m sphinx -q -W -b html docs build/docs
	OMP_NUM_THREADS=1 PYTHONPATH=tests JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
		$(BIN)/python -m fuzz --seconds 120 --calls 100 --seed 0  # always the same calls, so the commit is to blame

# Checks the types in the docs' examples with mypy and pyright; takes a minute.
check-examples: $(VENV)/.for-dev
	$(BIN)/python tools/check_examples.py

# Workers share the cards: tests/cards.py gives worker i card i mod their number.
# They compile most of the time: 14 to a card, or one to a core if there are fewer of these.
GPU_WORKERS ?= $(shell n=$$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l); printf '%s\n' $$((14 * n)) $$(nproc) | sort -n | head -1)
GPU_TESTS ?= gpu and not slow

# Each worker looks through all files that it is given, so it is given no others.
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.for-dev)
	PYTHONPATH="tests$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest -p cards -m '$(GPU_TESTS)' -n $(GPU_WORKERS) \
		--dist worksteal $$(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort)

# With the variants that `make test-gpu` leaves out.
test-gpu-all:
	$(MAKE) test-gpu GPU_TESTS=gpu

# CHROME names another Chromium or Chrome than the one on the PATH.
test-browser: $(VENV)/.for-dev
	@command -v "$${CHROME:-chromium}" >/dev/null || \
		{ echo "make test-browser needs Chromium: apt-get install chromium, or set CHROME to a Chrome" >&2; exit 1; }
	$(BIN)/python -m pytest -m browser tests/test_bench_pages.py

bench: $(VENV)/.for-demo
	$(BIN)/onchip bench linear_cross_entropy

# Makes anew what README and docs show of results/, and the picture; run it after adding a file there.
numbers: $(VENV)/.for-dev
	$(BIN)/python tools/measured.py

docs: $(VENV)/.for-dev
	$(BIN)/python -m sphinx -q -W -b html docs build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.for-demo: $(INSTALL)
	./tools/install.sh $(PYTHON) $(VENV) torch,jax,demo,demo-jax
	@touch $@

$(VENV)/.for-dev: $(INSTALL)
	./tools/install.sh $(PYTHON) $(VENV) torch,jax,demo,demo-jax,integrations,docs,dev
	@touch $@
