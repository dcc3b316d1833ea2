# The one task runner: the README, CI and contributors use these verbs. `make` alone explains them.

# Any Python from 3.11 on: PYTHON names one; otherwise the first of these that runs.
PYTHON  ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# How many test processes (many tests wait: more than there are cores), and what else pytest is told: make test ARGS="-k codec -x"
WORKERS ?= 4
ARGS    ?=

# Python keeps the bytecode of what it compiles: without that, every process of every test compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN  := $(VENV)/bin
# Not compiled: of 14,000 modules a run imports a few thousand, and Python keeps the bytecode of those.
PIP  := $(BIN)/python -m pip install --no-compile -c constraints.txt
# Named by what it was made from, so that an environment is brought up to date once and then left alone.
READY := $(VENV)/ready-$(firstword $(shell cat pyproject.toml constraints.txt | cksum))

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-torch lint type bench bench-quick generate docs setup clean

help: ## What can be done here
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: setup ## Train a small GPT, kill a rank in mid-save and compare bit for bit; then kill all beside a sidecar (a bucket: make demo ARGS="--root s3")
	$(BIN)/python examples/demo/demo.py $(ARGS)

test: setup ## The gate: what a change needs (narrow it: make test ARGS="-k codec"; ARGS=--costs prints what tests take)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# Another torch, over the packages of .venv. From PyPI it comes with its CUDA libraries: 3 GB to download, 6 GB on the disk.
TORCH ?= 2.10.0
OTHER := .venv-torch-$(TORCH)

test-torch: setup ## The tests of the client and of devices with another torch: make test-torch TORCH=2.10.0
	test -x $(OTHER)/bin/python || $(BIN)/python -m venv $(OTHER)
	test -d $(OTHER)/lib/python3*/site-packages/torch || $(OTHER)/bin/python -m pip install -q "torch==$(TORCH)"
	echo "import site; site.addsitedir('$(CURDIR)/$(wildcard $(VENV)/lib/python3*/site-packages)')" > "$$(echo $(OTHER)/lib/python3*/site-packages)/over.pth"
	$(OTHER)/bin/python -m pytest -n $(WORKERS) --dist loadgroup --nightly tests/unit/client tests/accelerator $(ARGS)

# The night has the frameworks, too, over the packages of .venv: half a gigabyte that no other verb needs.
FRAMEWORKS := .venv-integrations
WITH_FRAMEWORKS := $(FRAMEWORKS)/ready-$(firstword $(shell cat pyproject.toml constraints.txt constraints-integrations.txt | cksum))

test-all: setup $(WITH_FRAMEWORKS) ## The gate and the night: everything, with the frameworks that it is integrated with
	PATH="$$PATH:$(CURDIR)/$(BIN)" $(FRAMEWORKS)/bin/python -m pytest -n $(WORKERS) --dist loadgroup --nightly $(ARGS)

$(WITH_FRAMEWORKS): $(READY)
	test -x $(FRAMEWORKS)/bin/python || $(BIN)/python -m venv $(FRAMEWORKS)
	echo "import site; site.addsitedir('$(CURDIR)/$(wildcard $(VENV)/lib/python3*/site-packages)')" > "$$(echo $(FRAMEWORKS)/lib/python3*/site-packages)/over.pth"
	$(FRAMEWORKS)/bin/python -m pip install -q --no-compile -c constraints-integrations.txt --no-build-isolation -e '.[huggingface,lightning,ray,torchtitan,integrations]'
	@rm -f $(FRAMEWORKS)/ready-*
	@touch $@

lint: setup ## ruff: rules and formatting
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

type: setup ## mypy, strict: both packages, and user code in tests/typing
	$(BIN)/python -m mypy checkpointd client/checkpointd_client $(wildcard tests/typing)

bench: setup ## Measure every goal, beside the peers, and write benchmarks/RESULTS.md (hours, 32 GiB of disk); goes on where it was stopped
	$(BIN)/python benchmarks/compare.py --json build/bench.json --write

bench-quick: setup ## The same at small sizes, in a few minutes: a line for every goal that this measures
	$(BIN)/python benchmarks/compare.py --quick

generate: setup ## Write the generated parts of the documentation again
	$(BIN)/python docs/generate.py

docs: setup ## Build the documentation site strictly, and serve it at http://127.0.0.1:8000/docs/
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/site
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

setup: $(READY) ## Make .venv, or bring it up to date; every verb above does it first

# torch comes first and by itself: it is by far the largest, and one that is there already is kept.
# The build backends are installed like the rest, so that they are pinned like the rest. DeepSpeed's looks for torch; its
# operators are not built: what the tests use of it is Python.
$(READY):
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo "checkpointd needs Python 3.11 or newer. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -q hatchling setuptools
	DS_BUILD_OPS=0 $(PIP) -q --no-build-isolation -e '.[torch,deepspeed,serve,s3,gs,az,test,lint,docs]'
	@rm -f $(VENV)/ready-*
	@touch $@

clean: ## Remove what was built and cached, not the environment
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name '.?*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
