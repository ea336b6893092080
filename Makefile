# `make help` lists what there is. Every target sets up what it needs in $(VENV); the second time
# that takes no time, until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
ARGS ?=
CASES ?= 2000
FIGURES ?= runs/figures

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Files are compiled when they are first imported, which few of torch's and sympy's ever are; hundreds of processes then
# import the same ones, so their bytecode is kept, also where a shell says not to.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(VENV)/.stamp-demo ## train side by side with and without soframe, and show what it brings
	$(BIN)/python -m experiments demo

.PHONY: test
test: $(VENV)/.stamp-test ## run the test suite
	$(PYTEST) -n $(WORKERS) -m "not thorough" $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(VENV)/.stamp-test ## run it with more ranks, strategies, methods and examples, and on other kernels
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -n $(WORKERS) $(PYTEST_ARGS)
	$(MAKE) test-kernels

# The last bits of a product depend on the instructions that MKL, oneDNN and ATen choose for a processor.
NUMERICAL := $(addprefix tests/,capture kernels layers losses methods parity products solvers testing trust_region) \
    $(patsubst %,tests/test_%.py,clips counting demand few_rows fisher fused_adam growing kl_clip moving norm_clip observe \
    optimizer sharing stacks state_dtype statistics)

.PHONY: test-kernels
test-kernels: $(VENV)/.stamp-test ## run the numerical tests of one process with the instructions of two other processors
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 \
	    $(PYTEST) -n $(WORKERS) -m "not thorough and not distributed" $(NUMERICAL) $(PYTEST_ARGS)
	MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	    $(PYTEST) -n $(WORKERS) -m "not thorough and not distributed" $(NUMERICAL) $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: $(VENV)/.stamp-test ## run two cases of each quick test of one process, with few examples
	HYPOTHESIS_PROFILE=fast $(PYTEST) -n $(WORKERS) -m "not slow and not distributed and not thorough" \
	    --few --ignore tests/docs $(PYTEST_ARGS)

.PHONY: test-compatibility
test-compatibility: ## run the tests of trainers and other frameworks with their libraries, in $(VENV)-compatibility
	DS_BUILD_OPS=0 $(MAKE) VENV=$(VENV)-compatibility $(VENV)-compatibility/.stamp-compatibility
	OMP_NUM_THREADS=1 $(VENV)-compatibility/bin/python -m pytest tests/integrations \
	    $(wildcard tests/compatibility) tests/robustness/test_other_frameworks.py \
	    tests/layers/test_parametrised.py tests/layers/test_transformers_models.py \
	    tests/experiments/recipes/test_lora.py tests/experiments/recipes/test_recipes.py $(PYTEST_ARGS)

.PHONY: environment
environment: $(VENV)/.stamp-checks ## install what the checks need, at once
	@touch $(VENV)/.stamp-lint $(VENV)/.stamp-docs $(VENV)/.stamp-test

.PHONY: lint
lint: $(VENV)/.stamp-lint ## check style, docstrings and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.stamp-lint ## write the style that lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(VENV)/.stamp-docs ## build the documentation in docs/_build/html, warnings are errors
	$(BIN)/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html

.PHONY: wheel
wheel: $(VENV)/.stamp-release ## build the source distribution and the wheel in dist, and check their metadata
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Others take longer: `python -m benchmarks.simulation`, `scaling`, `time_to_target`, `methods` and `kaisa`; their pages
# have the commands.
.PHONY: figures
figures: $(VENV)/.stamp-demo ## draw the figures of the documentation that take under two minutes, in runs/figures (FIGURES=docs replaces them)
	@mkdir -p $(FIGURES)/benchmarks $(FIGURES)/guides
	$(BIN)/python -m experiments demo --output runs/demo
	cp runs/demo/digits-autoencoder.png $(FIGURES)/benchmarks/demo.png
	$(BIN)/python -m soframe plan bert-large --method kfac --ranks 64 --amp --figure $(FIGURES)/benchmarks/front.png
	cd runs/demo && PYTHONPATH=$(CURDIR) $(abspath $(BIN))/python $(CURDIR)/tests/docs/page.py $(CURDIR)/docs/guides/diagnostics.md
	cp runs/demo/factors.png $(FIGURES)/guides/diagnostics.png
	for picture in spectra influence laplace; do \
	    $(BIN)/python -m benchmarks.pictures $$picture $(FIGURES)/guides/$$picture.png || exit 1; done

.PHONY: bench
bench: $(VENV)/.stamp-test ## time whole steps, beside the libraries that are installed
	$(BIN)/python -m benchmarks.steps $(ARGS)

.PHONY: scaling
scaling: $(VENV)/.stamp-test ## time steps against width, depth, batch and ranks
	$(BIN)/python -m benchmarks.scaling $(ARGS)

.PHONY: bench-kernels
bench-kernels: $(VENV)/.stamp-test ## time the kernels with pytest-benchmark
	$(PYTEST) benchmarks --benchmark-only $(PYTEST_ARGS)

.PHONY: time-to-target
time-to-target: $(VENV)/.stamp-benchmark ## race the trust region against tuned peers, about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.time_to_target $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.stamp-test ## break 100 places of the code, each must fail a test (ARGS="--file ... --sample 0")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.stamp-test ## try 2000 odd constructors and batches (CASES=...), a few minutes
	HYPOTHESIS_PROFILE=thorough SOFRAME_FUZZ=$(CASES) $(PYTEST) -k fuzz $(PYTEST_ARGS)

.PHONY: clean
clean: ## remove the environment and everything that was built
	rm -rf $(VENV) $(VENV)-compatibility build dist *.egg-info docs/_build docs/api/generated
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find soframe experiments tests benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} +

# A command line that is to be checked for types needs the packages that it imports.
$(VENV)/.stamp-lint: EXTRAS = lint,demo
$(VENV)/.stamp-checks: EXTRAS = lint,demo,docs,test
$(VENV)/.stamp-%: EXTRAS = $*

$(VENV)/.stamp-%: pyproject.toml constraints.txt $(VENV)/.stamp
	$(PIP) install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "soframe needs Python 3.11 or later; '$(PYTHON)' is not." >&2; \
	    echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: its venv or ensurepip is missing." >&2; \
	    echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
