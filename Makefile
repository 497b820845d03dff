# Two commands do all the set-up: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint format types proto bench clean

demo: $(STAMP)
	$(BIN)/podrun --num-replicas 16 examples/digits/train.py

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-all: $(STAMP)
	$(BIN)/pytest -m ""

lint: $(STAMP)
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

# Regenerates the gRPC code that is checked in; needed only after a .proto file changes.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $$(find podrun -name '*.proto')

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "podrun needs Python 3.11 or later; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11" >&2; exit 2)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	touch $(STAMP)

clean:
	rm -rf $(VENV)
