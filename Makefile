# Two commands do all the set-up: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-rooms test-front test-processes test-all check format proto clean

demo: $(STAMP)
	$(BIN)/podrun --num-replicas 16 examples/digits/train.py

# Three lanes side by side on two cores: two of tests that compute in their own process, and the checks of the code with the tests
# that mostly wait for other processes, which go first whenever they have something to do. Lanes but the first show their output
# when they are done.
FRONT := tests/popart tests/models tests/estimate tests/device_tiles tests/conformance

test: $(STAMP)
	$(MAKE) --no-print-directory -j3 test-rooms test-front test-processes

test-rooms: $(STAMP)
	nice $(BIN)/pytest -m "not slow and not system" $(FRONT:%=--ignore=%)

test-front: $(STAMP)
	@nice $(BIN)/pytest -m "not slow and not system" -p no:cacheprovider $(FRONT) \
		> $(VENV)/test-front.log 2>&1; code=$$?; cat $(VENV)/test-front.log; exit $$code

test-processes: $(STAMP)
	@($(MAKE) --no-print-directory check && $(BIN)/pytest -m "system and not slow" -p no:cacheprovider) \
		> $(VENV)/test-processes.log 2>&1; code=$$?; cat $(VENV)/test-processes.log; exit $$code

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-all: $(STAMP)
	$(BIN)/pytest -m ""

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Regenerates the gRPC code that is checked in; needed only after a .proto file changes.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $$(find podrun -name '*.proto')

$(STAMP): pyproject.toml constraints.txt build_extension.py podrun/collectives/_meeting.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "podrun needs Python 3.11 or later; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11" >&2; exit 2)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	touch $(STAMP)

clean:
	rm -rf $(VENV)
