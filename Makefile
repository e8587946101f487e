# Everything needs only Python 3.11 to 3.13: each target creates $(VENV) and installs into it what it uses.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= eval,plot,dev
PYTEST_ARGS ?=
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: demo test test-all lint format install clean

demo: $(STAMP)
	$(BIN)/prehoc demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# The stamp is newer than these two files once everything they name is installed.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "error: there is no '$(PYTHON)'; install Python 3.11 to 3.13, or name one: make PYTHON=python3.12" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v[:2] <= (3, 13) else \
	  "error: $(PYTHON) is Python %d.%d, but prehoc needs 3.11 to 3.13; name another: make PYTHON=python3.12" % v[:2])'
	"$(PYTHON)" -m venv "$(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c "$(CONSTRAINTS)" setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c "$(CONSTRAINTS)" --no-build-isolation -e ".[$(EXTRAS)]"
	@touch "$@"

clean:
	rm -rf "$(VENV)" build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
