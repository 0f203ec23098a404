# Everything a machine with Python (3.11 or newer) and make needs; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: run test test-all lint clean

run: $(READY)
	$(BIN)/python -m mismatch_sim.run --noise.sigma 0.01 --staleness 4

test: lint
	$(BIN)/python -m pytest -n auto -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes, 2 to 3 GB"
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
