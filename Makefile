# Each target sets up its own virtual environment; nothing else is needed than a Python of 3.10 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SITE := .venv-site
RELEASE := .venv-release
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo test test-slow test-all lint docs site serve-site dist release-check gpu bench clean

help:  ## what each target does
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 16

demo: $(BIN)/.installed  ## the five commands of docs/start.md on your environment's docstrings (1 to 2 minutes on 2 cores)
	$(BIN)/python examples/demo.py --output runs/demo-$$(date +%Y%m%d-%H%M%S)

# One process per core, each with one torch thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# make test COVERAGE=96 fails if the tests run less than 96 % of the package's lines; before Python 3.12, which has
# sys.monitoring, that takes half as long again
export COVERAGE_CORE ?= sysmon
COVERED := $(if $(COVERAGE),--cov=st_magnitude --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE))

test: $(BIN)/.installed  ## the default tests
	$(PYTEST) -m "not slow" $(COVERED)

test-slow: $(BIN)/.installed  ## the slow tests
	$(PYTEST) -m slow

test-all: test test-slow  ## all tests

lint: $(BIN)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(BIN)/.installed  ## the examples in docstrings, README and docs
	$(BIN)/python -m pytest --doctest-modules st_magnitude
	$(BIN)/python -m pytest tests/test_docs.py

site: $(SITE)/.installed  ## the documentation site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict

serve-site: site  ## the same in a browser at http://localhost:8000
	$(SITE)/bin/python -m http.server --bind 127.0.0.1 --directory site 8000

$(SITE)/.installed: docs/requirements.txt  # apart: the demo learns what is installed with it
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --requirement $<
	touch $@

dist: $(RELEASE)/.installed  ## the sdist, and the wheel built from it
	rm -rf dist
	$(RELEASE)/bin/python -m build
	$(RELEASE)/bin/twine check --strict dist/*

release-check: dist  ## both in empty environments of every Python that is here (6 GB for each; minutes)
	PATH="$$PWD/$(RELEASE)/bin:$$PATH" .ci/release

$(RELEASE)/.installed:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet build twine uv
	touch $@

gpu: $(BIN)/.installed  ## versions, tests and a table of speed on a GPU, to paste (15 minutes)
	$(BIN)/python benchmarks/speed/gpu.py

bench: $(BIN)/.installed  ## the figures of the README and the docs (more than an hour on 2 cores)
	$(BIN)/python benchmarks/speed/index.py --encode
	for script in kernel scale sigreg index; do $(BIN)/python benchmarks/speed/$$script.py || exit 1; done
	$(BIN)/python benchmarks/studies/tables.py --check

$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:  ## removes environments, runs and what was built
	rm -rf $(VENV) $(SITE) $(RELEASE) .venv-minimum dist runs checkpoints site
