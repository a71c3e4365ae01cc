# Every command of this project. Each sets itself up, in an environment of its own
# inside this folder; all that is needed is make and Python 3.11 or newer with pip.
#
#     make demo     train a small network and see it learn
#     make test     the quick tests
#     make help     the rest
#
# Options of `make test`, which can be combined:
#
#     TESTS=tests/test_loops.py   only these files
#     MARK=slow                  other tests: thorough, conformance, cost, slow, or several with commas
#     VERSIONS=oldest            other versions, in an environment of its own: oldest, newest, nightly
#     X64=1                      in double precision
#     SWITCHES=jax_remat3        with some of JAX's experimental switches on
#     PART=2/3                   the second of three parts
#     JOBS=0 ARGS=--record-reports   accept changed reports: see tests/reports.py
#
# With `VERSIONS` or `X64`, and without `TESTS`, it runs the files whose result can differ there.
# These have the line `pytestmark = pytest.mark.versions`, or `pytest.mark.x64`.
#
# `make PYTHON=python3.12 test` chooses the interpreter (`make clean` to change it).

PYTHON ?= python3
JOBS ?= 2
TESTS :=
MARK := quick
VERSIONS :=
X64 :=
SWITCHES :=
PART := 1/1
# `make demo ARGS=--quick`: options of the example, pytest, the report, or the mutants.
ARGS :=
# The exact versions that the gate was run on. With `LOCK=`, those that are new today.
LOCK := .ci/lock.txt
# `make CUDA=cuda13 VERSIONS=gpu bench`: the extra of JAX that fits the driver.
CUDA ?= cuda12
# `VERSIONS=nightly`: the address of the package index with JAX's nightly builds.
NIGHTLY :=

.DEFAULT_GOAL := help
.PHONY: help demo test check format docs wheel bench mutants clean
# One pip at a time in an environment.
.NOTPARALLEL:

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## / {printf "make %-8s %s\n", $$1, $$2}' Makefile
	@sed -n 's/^# \(Options of .*\)/\n\1/p; s/^#     \([A-Z].*\)/    \1/p' Makefile

# ---------------------------------------------------------------- set-up

VENV := .venv$(VERSIONS:%=-%)
BIN := $(VENV)/bin
# To compile all modules takes half a minute. Python compiles and keeps those that it imports.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=
PINS := $(if $(filter oldest,$(VERSIONS)),$(VENV)/pins.txt,$(LOCK))
WANTED := $(if $(filter newest nightly,$(VERSIONS)),3.13 3.12,$(if $(filter oldest,$(VERSIONS)),3.11))
$(if $(filter-out oldest newest nightly gpu,$(VERSIONS)),$(error VERSIONS is oldest, newest, nightly or gpu))
ifneq ($(WANTED),)
PYTHON := $(shell .ci/find-python $(WANTED))
$(if $(PYTHON),,$(error VERSIONS=$(VERSIONS) has no Python))
endif

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
	    echo "eqx-grads needs Python 3.11 or newer, and '$(PYTHON)' is not:" \
	        "try 'make PYTHON=python3.12 ...'." >&2; exit 1; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PIP_INSTALL) --upgrade pip $(LOCK:%=--constraint %) \
	    || { rm -rf $(VENV); exit 1; }

# The floors, and for all other packages the lock.
$(VENV)/pins.txt: .ci/oldest.txt $(LOCK) | $(BIN)/python
	@cat .ci/oldest.txt > $@
	@sed -n 's/==.*/==/p' .ci/oldest.txt | grep -hv -f - $(LOCK) /dev/null >> $@ || true

# `.venv/.tests` is a stamp: younger than pyproject.toml while the group `tests` is installed as
# written there.
$(VENV)/.%: pyproject.toml $(PINS) | $(BIN)/python
	@echo "Installing eqx-grads and its group '$*' in $(VENV) (may take a minute)"
	@$(PIP_INSTALL) $(PINS:%=--constraint %) $(LOCK:%=--build-constraint %) \
	    --editable . --group $*
ifeq ($(VERSIONS),nightly)
	@test -n "$(NIGHTLY)" || { echo "VERSIONS=nightly needs NIGHTLY=index: the index is on" \
	    "https://docs.jax.dev/en/latest/installation.html#nightly-installation" >&2; exit 1; }
	$(PIP_INSTALL) --upgrade --pre jax jaxlib --index-url "$(NIGHTLY)"
else ifeq ($(VERSIONS),gpu)
	$(PIP_INSTALL) "jax[$(CUDA)]"
endif
	@touch $@

# ---------------------------------------------------------------- see it work

demo: $(VENV)/.examples  ## train a small spiking network
	$(BIN)/python examples/spiking_digits.py $(ARGS)

# ---------------------------------------------------------------- tests

# Other files need not be imported.
comma := ,
WHAT := $(if $(VERSIONS)$(SWITCHES),versions,$(if $(X64),x64,$(if $(findstring quick,$(MARK))$(findstring thorough,$(MARK)),,$(MARK))))
FILES = $(or $(TESTS),$(if $(WHAT),$(shell \
    grep -lE 'mark\.($(subst $(comma),|,$(WHAT)))\b' tests/*.py tests/guard/*.py),$(if \
    $(filter quick,$(MARK)),$(shell \
    grep -LE '^pytestmark.*mark\.(cost|thorough)' tests/test_*.py tests/guard/test_*.py))))
# JAX reads a switch from the environment, `JAX_REMAT3=1`. `tests/conftest.py` sees that it is on.
ENVIRONMENT = $(if $(X64),JAX_ENABLE_X64=1) $(SWITCHES:%=SWITCHES=%) \
    $(shell echo "$(SWITCHES:%=%=1)" | sed 's/,/=1 /g' | tr a-z A-Z)

# What was compiled in the last week is not compiled again, nor by the other process.
CACHE = JAX_COMPILATION_CACHE_DIR="$(abspath $(VENV))/compiled" \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
# The programs of the quick tests are small and run once: what the compiler does to make them
# fast takes half of the time. The slow tests run what users run. XLA aborts at a flag that it
# does not know, as JAX 0.12 no longer knows this one, and takes a blank for the name of a file.
COMPILE_QUICKLY = $(CACHE) JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 \
    XLA_FLAGS="$${XLA_FLAGS:+$$XLA_FLAGS }$$($(BIN)/python -c 'import jax; jax.__version_info__ < (0, 11) \
        and print("--xla_cpu_use_fusion_emitters=false")')"
COMPILE = $(if $(findstring cost,$(MARK)),,$(if $(findstring slow,$(MARK)),$(CACHE),$(COMPILE_QUICKLY)))

# Contiguous halves of the tests, as neighbors share what they compile and compare with.
test: $(VENV)/.tests  ## the quick tests, or others: see below
	@mkdir -p $(VENV)/compiled
	@find $(VENV)/compiled -type f -mtime +7 -delete
	$(ENVIRONMENT) $(COMPILE) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
	    --tier $(MARK) --part $(PART) $(ARGS) $(FILES)

mutants: $(VENV)/.tests  ## faults planted in the library: are they noticed? (an hour or more)
	$(COMPILE_QUICKLY) $(BIN)/python -W ignore .ci/mutants.py $(VENV)/mutants $(ARGS)

# ---------------------------------------------------------------- checks

check: $(VENV)/.lint $(VENV)/.tests  ## style, likely mistakes, layers, static types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.lint  ## format, and repair what can be repaired
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.docs  ## build the documentation, in site/
	$(BIN)/mkdocs build --strict

wheel: $(VENV)/.build  ## build the package, and use it in empty environments
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	@python=$$(.ci/find-python 3.11) && \
	    .ci/install-and-use "$$python" dist/*.whl --constraint .ci/oldest.txt
	@python=$$(.ci/find-python 3.13 3.12) && \
	    .ci/install-and-use "$$python" dist/*.tar.gz $(LOCK:%=--constraint %)

bench: $(VENV)/.tests  ## the benchmarks, in report.md; on a GPU: VERSIONS=gpu
	$(BIN)/python benchmarks/report.py --jobs $(JOBS) --out report.md $(ARGS)

clean:  ## remove all that these commands made
	rm -rf .venv .venv-* report.md dist build site notebooks .import_linter_cache \
	    .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
