# Everything happens in .venv. The two commands of the README: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := setup.py $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*.h csrc/cpu/*.cpp)

.PHONY: demo test lint format bench install clean

install: $(VENV)/.installed

# Editable: Python files are used where they lie, the extension is rebuilt when csrc changes.
$(VENV)/.installed: pyproject.toml constraints.txt $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/dapo train recipes/tiny.yaml

test: install
	$(BIN)/python -m pytest -n 2 --require-cpp -m "not slow and not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV)/.installed build dist *.egg-info dapo_kernels/*.so .pytest_cache .mypy_cache .ruff_cache
