# Two commands do all the set-up: `make demo` installs what programs of PopART need, `make test` what podrun's tests need besides.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# On a terminal pip shows what it downloads: the first `make` fetches several hundred megabytes.
PIP_SHOWS := $(shell test -t 2 || echo --quiet)
# A machine of CI uses its environment once: there Python compiles only the modules that it imports, which takes half as long.
PIP_COMPILES := $(if $(CI),--no-compile)
# There pytest would rewrite the assertions of all test files, for twenty seconds of a core, to show the values of one that fails: it
# shows the variables of the test instead. Elsewhere what it has rewritten is kept.
SHOWS_VALUES := $(if $(CI),--assert=plain --showlocals)
# Nor does another run read what mypy would write, an eighth of its time.
MYPY_CACHE := $(if $(CI),--cache-dir=/dev/null)

# Tests start hundreds of processes: each would compile podrun's modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs pictures demo test test-rooms test-programs test-processes test-slurm test-all stress check format proto clean

demo: $(RUNS)
	$(BIN)/podrun --num-replicas 16 examples/digits/train.py

# Three lanes side by side on two cores: two of tests that compute in their own process, and the checks of the code with the tests
# that mostly wait for other processes, which go first whenever they have something to do. Lanes but the first show their output
# when they are done.
# Only files with such tests: collecting them all takes the lane seven seconds. Such tests of front ends over other libraries are
# slow (tests/test_conftest.py holds that), so that the lane imports neither torch nor TensorFlow.
SYSTEM = $(shell grep -rl "mark\.system" tests --include="test_*.py" --exclude-dir=poptorch --exclude-dir=tensorflow)
# About half of the processor time of all tests that compute in their own process.
PROGRAMS := $(addprefix tests/,compiler conformance costmodel estimate models numerics onnx_models popart)

# Python's own end looks at all objects of a process, for one to three seconds.
PYTEST = $(BIN)/python -c "import pytest; code = pytest.main(); from tests.copies import leave; leave(code)"

test: $(STAMP)
	$(MAKE) --no-print-directory -j3 test-rooms test-programs test-processes

test-rooms: $(STAMP)
	nice $(PYTEST) $(SHOWS_VALUES) -m "not slow and not system" $(PROGRAMS:%=--ignore=%)

test-programs: $(STAMP)
	@nice $(PYTEST) $(SHOWS_VALUES) -m "not slow and not system" -p no:cacheprovider $(PROGRAMS) \
		> $(VENV)/test-programs.log 2>&1; code=$$?; cat $(VENV)/test-programs.log; exit $$code

test-processes: $(STAMP)
	@($(MAKE) --no-print-directory check && $(PYTEST) $(SHOWS_VALUES) -m "system and not slow" -p no:cacheprovider $(SYSTEM)) \
		> $(VENV)/test-processes.log 2>&1; code=$$?; cat $(VENV)/test-processes.log; exit $$code

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(MYPY_CACHE)

# Random convolutions: calls whose every buffer ends at a page that kills, then programs in fresh processes against XLA's own, for so
# long.
MINUTES ?= 10

stress: $(STAMP)
	$(BIN)/python -m tests.stress.guarded --cases 20000
	$(BIN)/python -m tests.stress.networks --cases 5000
	$(BIN)/python -m tests.stress.dense --cases 500
	$(BIN)/python -m tests.stress.convolutions --minutes $(MINUTES)

# Prolog and epilog against a real Slurm of this host: apt-get install slurmctld slurmd slurm-client munge; as root.
test-slurm: $(STAMP)
	$(BIN)/pytest -m "" tests/slurm

test-all: $(STAMP)
	$(BIN)/pytest -m ""

# The site, in build/site. Fails on a link that leads nowhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet -f website/mkdocs.yml
	@echo "Open build/site/index.html in a browser."

# The site's pictures, from runs and reports of the examples.
pictures: $(STAMP)
	$(BIN)/python website/pictures.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Regenerates the messages that are checked in; needed only after a .proto file changes.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $$(find podrun -name '*.proto')

SOURCES := pyproject.toml constraints.txt build_extension.py podrun/collectives/_collectives.c podrun/device/_crash_stack.c \
	$(wildcard podrun/device/xla/native/*)
PIP_INSTALL = $(BIN)/python -m pip install $(PIP_SHOWS) $(PIP_COMPILES) --disable-pip-version-check -c constraints.txt
OLD_PYTHON = podrun needs Python 3.11 or later; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11

# $(call install,EXTRAS,WORDS): podrun with these extras, after a line that says what is coming.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "$(OLD_PYTHON)" >&2; exit 2)
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@echo "Installing podrun into $(VENV): $(2)"
@$(PIP_INSTALL) -e '.[$(1)]'
endef

$(RUNS): $(SOURCES)
	$(call install,examples,about 1.2 GB in a minute and a half.)
	@touch $@

# All of it, so that the demo installs nothing afterwards.
$(STAMP): $(SOURCES)
	$(call install,examples$(comma)torch$(comma)tensorflow$(comma)dev,torch$(comma) TensorFlow$(comma) linters and what the tests compare with; this takes some minutes.)
	@$(PIP_INSTALL) --no-deps nvidia-pytriton==0.7.0
	@touch $(RUNS) $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV)
