# Every command of this project. Each sets itself up, in an environment of its own
# inside this folder; all that is needed is make and Python 3.11 or newer with pip.
#
#     make demo     train a small network and see it learn
#     make test     the quick tests
#     make help     the rest
#
# `make PYTHON=python3.12 test` chooses the interpreter (`make clean` to change it).

PYTHON ?= python3
JOBS ?= 2
# `make test-slow TESTS=tests/test_scan.py`: only these files.
TESTS :=
# `make test-slow PART=2/3`: the second of three parts of the slow tests.
PART ?= 1/1
# `make demo ARGS=--quick`: options of the example.
ARGS ?=
# `make test-switches SWITCHES=jax_remat3`: with some of JAX's experimental switches on.
SWITCHES ?= jax_custom_vjp3 jax_custom_jvp3 jax_remat3
# `make CUDA=cuda13 test-gpu`: the extra of JAX that fits the driver.
CUDA ?= cuda12
# The random cases of `make fuzz`. The slow tests have the seeds up to 40.
SEED ?= 1000
CASES ?= 1000
# `make test-nightly`: the address of the package index with JAX's nightly builds.
NIGHTLY ?=
# `make soak MINUTES=5`: for how long.
MINUTES ?= 20

VENV := .venv
BIN := $(VENV)/bin
# Contiguous halves of the tests, as neighbors share what they compile and compare with.
PYTEST = -m pytest -n $(JOBS) --dist worksteal $(TESTS)
QUICK := -m "not (slow or conformance or cost or thorough)"
WITH_THOROUGH := -m "not (slow or conformance or cost)"
# On other versions and in double precision: the quick tests, or with `TESTS=tests` both.
MARKS = $(if $(filter tests,$(TESTS)),$(WITH_THOROUGH),$(QUICK))
# What was compiled in the last week is not compiled again, nor by the other process.
CACHE = JAX_COMPILATION_CACHE_DIR="$(abspath $(VENV))/compiled" \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
# The programs of the quick tests are small and run once: what the compiler does to make them
# fast takes half of the time. The slow tests run what users run. XLA aborts at a flag that it
# does not know, as JAX 0.12 no longer knows this one, and takes a blank for the name of a file.
COMPILE_QUICKLY = $(CACHE) JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 \
    XLA_FLAGS="$${XLA_FLAGS:+$$XLA_FLAGS }$$($(BIN)/python -c 'import jax; jax.__version_info__ < (0, 11) \
        and print("--xla_cpu_use_fusion_emitters=false")')"

# The test files that the gate runs on other versions and in double precision too: those whose
# result can differ there (see CONTRIBUTING.md). `TESTS=tests` runs all.
DIFFERS_BETWEEN_VERSIONS = tests/guard/test_programs.py $(patsubst %,tests/test_%.py, \
    call_primitive closure_errors closures control_flow custom_gradient decorated def_vmap \
    eager_calls elementwise explicit_axes export \
    filter_custom_jvp filter_custom_vjp filter_map hiprim host_buffers host_function interpret \
    jax_drop_ins \
    jaxprs known_zeros linear_function many_devices many_devices_explicit named_axes \
    nondifferentiable pickles recurrence replay scan scan_methods second_order_in_scan \
    self_application shard_map shard_map_cases sharded_vocabulary tangents threads traced_loss \
    transforms transposes truncate upstream users_classes zeros)
DIFFERS_IN_X64 = tests/guard/test_programs.py $(patsubst %,tests/test_%.py, \
    arguments call_primitive captured_numpy check_rule control_flow custom_gradient def_vmap \
    elementwise filter_custom_jvp filter_custom_vjp gradient_layers gradient_ops \
    host_bits host_broadcast host_buffers host_function host_rules jax_drop_ins jaxprs \
    known_zeros linear_function linear_host_function losses quantized_integers \
    quantized_layers recurrence replace_gradient replay rounded_functions safe_corners \
    safe_elementwise safe_reductions same_function scan ste surrogates tangents transforms \
    transposes truncate zeros)

.DEFAULT_GOAL := help
.PHONY: help demo test guard test-thorough conformance cost test-slow test-x64 test-leaks test-oldest \
    test-newest test-nightly test-switches test-gpu gpu-report mutants fuzz soak lint format types \
    layers docs notebooks wheel clean _test-versions _nightly _report _prune

# One pip at a time in an environment.
.NOTPARALLEL:

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

# ---------------------------------------------------------------- set-up
# `.venv/.tests` is a stamp: younger than pyproject.toml while the group `tests` is
# installed as written there. PINS names a file of exact versions, or nothing.

PINS :=

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
	    echo "eqx-grads needs Python 3.11 or newer, and '$(PYTHON)' is not:" \
	        "try 'make PYTHON=python3.12 ...'." >&2; exit 1; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade pip || { rm -rf $(VENV); exit 1; }

$(VENV)/.%: pyproject.toml $(PINS) | $(BIN)/python
	@echo "Installing eqx-grads and its group '$*' in $(VENV) (may take a minute)"
	@$(BIN)/python -m pip install --quiet $(PINS:%=--constraint %) --editable . --group $*
	@touch $@

# ---------------------------------------------------------------- see it work

demo: $(VENV)/.examples  ## train a small spiking network
	$(BIN)/python examples/spiking_digits.py $(ARGS)

# ---------------------------------------------------------------- tests

test: $(VENV)/.tests _prune  ## the quick tests
	$(COMPILE_QUICKLY) $(BIN)/python $(PYTEST) $(QUICK)

guard: TESTS = tests/guard
guard: $(VENV)/.tests _prune  ## the part of the quick tests that has every op and the contract
	$(COMPILE_QUICKLY) $(BIN)/python $(PYTEST) $(QUICK)

# Other files need not be imported.
FILES_WITH = $(shell grep -lE 'mark\.$(1)\b' tests/*.py tests/guard/*.py)

test-thorough: TESTS = $(call FILES_WITH,thorough)
test-thorough: $(VENV)/.tests _prune  ## longer: whole models, the documentation, an example
	$(COMPILE_QUICKLY) $(BIN)/python $(PYTEST) -m "thorough and not slow"

conformance: TESTS = $(call FILES_WITH,conformance)
conformance: $(VENV)/.tests _prune  ## every healthy op, and every planted fault
	$(COMPILE_QUICKLY) $(BIN)/python $(PYTEST) -m conformance

cost: TESTS = $(call FILES_WITH,cost)
cost: $(VENV)/.tests  ## FLOPs and bytes, compiled as users do
	$(BIN)/python $(PYTEST) -m cost

_prune:
	@mkdir -p $(VENV)/compiled
	@find $(VENV)/compiled -type f -mtime +7 -delete

# Exit status 5: no test is marked slow.
test-slow: $(VENV)/.tests _prune  ## the slow tests, or a part: PART=2/3
	$(CACHE) $(BIN)/python $(PYTEST) -m slow --part $(PART) || [ $$? -eq 5 ]

test-x64: TESTS = $(DIFFERS_IN_X64)
test-x64: $(VENV)/.tests _prune  ## what can differ in double precision
	JAX_ENABLE_X64=1 $(COMPILE_QUICKLY) $(BIN)/python $(PYTEST) $(MARKS)

MUTANTS = $(COMPILE_QUICKLY) $(BIN)/python .ci/mutants.py --work $(VENV)/mutants

mutants: $(VENV)/.tests _prune  ## faults planted in the library: are they noticed? (hours)
	$(MUTANTS) reached
	$(MUTANTS) run --suite guard
	$(MUTANTS) run --suite old --files 25 --per-file 4 --per-mutant 30
	$(MUTANTS) report --reasons tests/guard/survivors.json

fuzz: $(VENV)/.tests  ## random cases: SEED=7 CASES=1000
	$(BIN)/python -m tests.guard.programs $(SEED) $(CASES)

soak: $(VENV)/.tests  ## train every layer for MINUTES (20), and see that nothing grows
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES)

test-leaks: TESTS = tests/test_leaks.py
test-leaks: $(VENV)/.tests  ## the leak tests, with JAX's leak checker on
	JAX_CHECK_TRACER_LEAKS=1 $(BIN)/python $(PYTEST)

test-oldest:  ## what can differ between versions, on the oldest supported ones
	@python=$$(.ci/find-python 3.11) && \
	    $(MAKE) --no-print-directory VENV=.venv-oldest PYTHON="$$python" \
	        PINS=.ci/oldest.txt _test-versions

test-newest:  ## the same, on the newest JAX and Python
	@python=$$(.ci/find-python 3.13 3.12) && \
	    $(MAKE) --no-print-directory VENV=.venv-newest PYTHON="$$python" _test-versions

test-nightly:  ## the same, on the last nightly build of JAX, from NIGHTLY
	@test -n "$(NIGHTLY)" || { echo "make NIGHTLY=index test-nightly: the index is on" \
	    "https://docs.jax.dev/en/latest/installation.html#nightly-installation" >&2; exit 1; }
	@python=$$(.ci/find-python 3.13 3.12) && \
	    $(MAKE) --no-print-directory VENV=.venv-nightly PYTHON="$$python" _nightly

_nightly: $(VENV)/.tests
	$(BIN)/python -m pip install --quiet --upgrade --pre jax jaxlib --index-url "$(NIGHTLY)"
	@$(MAKE) --no-print-directory _test-versions

test-switches:  ## the same, on the newest JAX with SWITCHES on (all three)
	@switches="$(SWITCHES)" $(MAKE) --no-print-directory test-newest

# JAX reads a switch from the environment: `JAX_REMAT3=1`.
_test-versions: TESTS = $(DIFFERS_BETWEEN_VERSIONS)
_test-versions: $(VENV)/.tests _prune
	@$(BIN)/python -c "import equinox, jax, numpy, sys; \
	    print('Python', sys.version.split()[0], 'JAX', jax.__version__, \
	    'Equinox', equinox.__version__, 'NumPy', numpy.__version__)"
	@for switch in $$switches; do \
	    export "$$(echo "$$switch" | tr a-z A-Z)=1"; \
	    $(BIN)/python -c "import jax; assert jax.config.$$switch" || exit 1; \
	    echo "JAX's switch $$switch is on."; \
	done; \
	$(COMPILE_QUICKLY) $(BIN)/python $(PYTEST) $(MARKS)

# ---------------------------------------------------------------- on a GPU

test-gpu:  ## the quick tests on a GPU
	@$(MAKE) --no-print-directory ONLY=tests gpu-report

ONLY := tests benchmarks

gpu-report:  ## tests and benchmarks on a GPU, in gpu-report.md
	@if nvidia-smi -L 2>/dev/null; then \
	    $(MAKE) --no-print-directory VENV=.venv-gpu _report; \
	else \
	    echo "No GPU here (nvidia-smi finds none), so nothing was run on one."; \
	fi

_report: $(VENV)/.tests
	$(BIN)/python -m pip install --quiet "jax[$(CUDA)]"
	$(BIN)/python benchmarks/report.py --only $(ONLY) --jobs $(JOBS) --out gpu-report.md

# ---------------------------------------------------------------- checks

lint: $(VENV)/.lint  ## style and likely mistakes
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/.lint  ## format, and repair what can be repaired
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.lint $(VENV)/.tests  ## static types
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/.lint  ## which file may import which
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## build the documentation, in site/
	$(BIN)/mkdocs build --strict

notebooks: $(VENV)/.notebooks  ## an executed notebook of each example, in notebooks/
	$(BIN)/python docs/notebooks.py

wheel: $(VENV)/.build  ## build the package, and use it in empty environments
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	@python=$$(.ci/find-python 3.11) && \
	    .ci/install-and-use "$$python" dist/*.whl --constraint .ci/oldest.txt
	@python=$$(.ci/find-python 3.13 3.12) && .ci/install-and-use "$$python" dist/*.tar.gz

clean:  ## remove all that these commands made
	rm -rf .venv .venv-oldest .venv-newest .venv-nightly .venv-gpu gpu-report.md dist build site \
	    notebooks .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
