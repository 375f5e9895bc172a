# make run     pretrain the embedded default, end to end
# make test    all tests            make check   format, lint, types, taste
# make bench   every speed claim    make mutants deliberate faults: does the test named for each one fail?
# make clean   remove the environment (work/ stays)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: run test check bench mutants clean
.DELETE_ON_ERROR:

run: $(INSTALLED)
	$(BIN)/luigi --module pipeline BertPhase2

# One worker more than there are cores: most tests wait for processes of their own. The long ones come first.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --collect-only --no-summary
	$(BIN)/python -m pytest tests/test_taste.py

bench: $(INSTALLED)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[bench]'
	$(BIN)/python -m benchmarks

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants.run $(ARGS)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old: Python 3.11 or newer is needed; give one with make PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
