# make run     pretrain the embedded default, end to end
# make test    all tests but the slow ones, which are: make test-slow; both in one run: make test MARK=
# make check   format, lint, types (make style), that all tests can be collected, taste
# make bench   the claims of docs/benchmarks.md    make mutants  deliberate faults: does the test named for each one fail?
# make docs    the documentation as a site in build/site
# make test-newest, make test-lowest: the main job and the contracts with the newest and the lowest versions of packages that
#              pyproject.toml allows        make constraints   renew constraints.txt, the versions that are tested
# make clean   remove the environment (work/ stays)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
INSTALL = $(UV) pip install --quiet --compile-bytecode --build-constraint constraints.txt --python $(BIN)/python
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed

# Images often set it: then each of the thousands of commands that tests start would compile all of its modules.
export PYTHONDONTWRITEBYTECODE =

.PHONY: run test test-slow style check bench mutants docs test-newest test-lowest constraints clean
.DELETE_ON_ERROR:

run: $(RUNTIME)
	$(BIN)/luigi --module pipeline BertPhase2

# A worker more than there are cores; slow tests wait more, for processes of their own.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + $(if $(filter not,$(MARK)),1,2))')
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
MARK ?= not slow
test: $(INSTALLED)
	$(PYTEST) -m '$(MARK)' $(ARGS)

test-slow:
	$(MAKE) test MARK=slow

style: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: style
	$(BIN)/python -m pytest --collect-only --no-summary
	$(BIN)/python -m pytest tests/test_taste.py

bench: $(INSTALLED)
	$(INSTALL) --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants.run $(ARGS)

docs: $(INSTALLED)
	$(BIN)/sphinx-build -q --fail-on-warning --keep-going -c docs/site -b html . build/site
	@echo build/site/docs/site/index.html

test-newest test-lowest: test-%:
	rm -rf $(VENV)-$*
	$(MAKE) $(VENV)-$*/bin/uv VENV=$(VENV)-$*
	$(VENV)-$*/bin/uv pip install --quiet --compile-bytecode --python $(VENV)-$*/bin/python --editable '.[test]' \
	  --resolution $(if $(filter newest,$*),highest,lowest-direct)
	$(VENV)-$*/bin/python -m pytest -n $(WORKERS) --dist loadscope tests/contract tests/e2e/test_chain.py $(ARGS)

constraints: $(UV)
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header \
	  --extra dev --extra bench --extra docs pyproject.toml --output-file constraints.txt

# PyTorch's own index has builds for the machine at hand: without a GPU, one without the gigabytes of CUDA's libraries.
# Each build names the versions of these libraries; those in constraints.txt are of one release of CUDA.
$(RUNTIME): pyproject.toml constraints.txt | $(UV)
	grep -v -e ^nvidia- -e ^triton= constraints.txt > $(VENV)/constraints.txt
	$(INSTALL) --constraint $(VENV)/constraints.txt --torch-backend auto --editable . 2>$(VENV)/install.log || \
	  { echo "note: torch comes with CUDA's libraries, as PyTorch's build for this machine was not installed:" \
	      "$$(tail -n 1 $(VENV)/install.log)" >&2; \
	    $(INSTALL) --constraint constraints.txt --editable . ; }
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(UV)
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $(RUNTIME) $@

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "error: $$($(PYTHON) --version) is not one of Python 3.11 to 3.14; give one with make PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-lowest build/site
