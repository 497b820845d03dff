"""What tests start is as a user starts it, however the run of the tests was started."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import pytest_collection_modifyitems
from tests.quick_programs import BY_DEFAULT, FIXTURE, forget_programs
from tests.sampling import FEW, chosen

ROOT = Path(__file__).resolve().parent.parent


def test_commands_hear_signals_that_the_run_of_the_tests_ignores() -> None:
    """As under nohup, or from a background job; the run itself stays as deaf as it was."""
    numbers = (signal.SIGHUP, signal.SIGINT)
    program = (
        "import os, signal, subprocess\n"
        f"for number in {[int(n) for n in numbers]}:\n    signal.signal(number, signal.SIG_IGN)\n"
        "import tests.conftest\n"
        f"for number in {[int(n) for n in numbers]}:\n    os.kill(os.getpid(), number)\n"
        "print(subprocess.run(['grep', 'SigIgn', '/proc/self/status'], capture_output=True, text=True).stdout)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    ignored = int(done.stdout.split()[1], 16)
    assert [number for number in numbers if ignored >> (number - 1) & 1] == []


def test_what_a_test_starts_leaves_no_folder(tmp_path: Path) -> None:
    """A process of multiprocessing ends as here, without what Python does at the end of a program."""
    program = "import os, tests.conftest; os._exit(os.environ['HOME'] != os.environ[tests.conftest.OF_A_RUN])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


class Case:
    """A collected test, as the hook of pytest sees it."""

    def __init__(self, nodeid: str, every: int | None, **values: object) -> None:
        self.nodeid, self.every, self.slow = nodeid, every, False
        if values:
            self.callspec = SimpleNamespace(params=values)

    def get_closest_marker(self, name: str) -> object:
        return None if self.every is None else pytest.mark.sample(self.every).mark

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.slow = mark.name == "slow"


def test_of_a_sampled_test_every_nth_case_runs_by_default() -> None:
    cases = [Case(f"a.py::one[{n}]", 3, seed=n) for n in range(5)]
    cases += [Case(f"a.py::two[{n}]", 2, seed=n) for n in range(3)]
    cases += [Case("a.py::three[0]", None, seed=0), Case("a.py::four", 2)]
    pytest_collection_modifyitems(cases)  # type: ignore[arg-type]
    assert [c.nodeid for c in cases if not c.slow] == [
        *("a.py::one[0]", "a.py::one[3]", "a.py::two[0]", "a.py::two[2]", "a.py::three[0]", "a.py::four")
    ]


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    every=st.integers(1, 40),
    dropped=st.integers(1, 7),
)
def test_every_value_of_a_sampled_parameter_runs_by_default(
    sizes: list[int], every: int, dropped: int
) -> None:
    """Whatever the parameters, their order and how many cases each step passes over; with some cases left out too."""
    names = "abcd"[: len(sizes)]
    crossed = [dict(zip(names, values, strict=True)) for values in itertools.product(*map(range, sizes))]
    cases = [case for i, case in enumerate(crossed) if i == 0 or (i * 7) % 8 != dropped]
    kept = chosen(cases, every)
    wanted = -(-len(cases) // every)
    assert kept == sorted(set(kept))
    assert wanted <= len(kept) <= max(wanted, sum(sizes))
    for name in names:
        values = {case[name] for case in cases}
        if len(values) < len(cases) and len(values) <= max(FEW, wanted):
            assert {cases[i][name] for i in kept} == values


def test_a_step_that_fits_the_parameters_passes_over_no_value() -> None:
    """Every second case of a type beside two others would be of one type; of 36, every sixth has one of six places."""
    two = [{"size": size, "dtype": dtype} for size in range(5) for dtype in ("half", "float")]
    assert {two[i]["dtype"] for i in range(0, 10, 2)} == {"half"}
    kept = chosen(two, 2)
    assert len(kept) == 5
    assert {two[i]["dtype"] for i in kept} == {"half", "float"}
    assert {two[i]["size"] for i in kept} == set(range(5))
    square = [{"a": a, "b": b} for a in range(6) for b in range(6)]
    kept = chosen(square, 6)
    assert len(kept) == 6
    assert {square[i]["a"] for i in kept} == {square[i]["b"] for i in kept} == set(range(6))


@pytest.mark.parametrize("fixture", [FIXTURE, BY_DEFAULT])
def test_programs_of_tests_are_forgotten_where_their_options_change(
    fixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX keeps what it compiled by what is computed, not by options: the order of rooms would decide on bits."""
    forgotten: list[str] = []
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(clear_caches=lambda: forgotten.append("all")))
    quick, plain, other = (SimpleNamespace(fixturenames=names) for names in ([fixture], ["tmp_path"], []))
    for done, following in ((quick, quick), (plain, other), (quick, None)):
        forget_programs(done, following)  # type: ignore[arg-type]
    assert not forgotten
    forget_programs(quick, plain)  # type: ignore[arg-type]
    forget_programs(other, quick)  # type: ignore[arg-type]
    assert forgotten == ["all", "all"]


FRONT_ENDS = ("poptorch", "tensorflow")
"""``make test-processes`` leaves these folders of tests out, whose files import torch and TensorFlow."""


def test_tests_of_front_ends_over_other_libraries_that_start_processes_are_slow() -> None:
    marks: list[tuple[str, set[str]]] = []
    for path in (path for folder in FRONT_ENDS for path in (ROOT / "tests" / folder).rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        marks += [(f"{path.name}::{name}", own) for name, own in marked_tests(tree.body)]
    system = [(name, own) for name, own in marks if "system" in own]
    assert len(system) > 5
    assert [name for name, own in system if "slow" not in own] == []


@pytest.mark.slow
@pytest.mark.system
def test_pytest_knows_of_no_others_either() -> None:
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "system and not slow"]
    words += [f"tests/{folder}" for folder in FRONT_ENDS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


def test_marks_are_seen_wherever_pytest_takes_them_from() -> None:
    source = """
pytestmark: list[object] = [pytest.mark.system, pytest.mark.skipif(True)]
@pytest.mark.a
class TestOne:
    pytestmark = pytest.mark.b
    @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.c), pytest.param(3, marks=(pytest.mark.d,))])
    async def test_two(self): ...
if True:
    @pytest.mark.e
    def test_three(): ...
def helper(): ...
"""
    of_file, two = {"system", "skipif"}, {"system", "skipif", "a", "b", "parametrize"}
    assert list(marked_tests(ast.parse(source).body)) == [
        *(("test_two", two), ("test_two", two | {"c"}), ("test_two", two | {"d"})),
        ("test_three", of_file | {"e"}),
    ]


def marked_tests(body: Sequence[ast.AST], around: Set[str] = frozenset()) -> Iterator[tuple[str, set[str]]]:
    """Tests, and cases of theirs with marks of their own: names and marks. ``around``: marks of what they are in."""
    own = {*around}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            own |= _marks(node.value) if ast.unparse(target) == "pytestmark" else set()
    for node in body:
        marks = own.union(*map(_marks, getattr(node, "decorator_list", [])))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from marked_tests(getattr(node, "body", []), marks)
        elif node.name.startswith("test_"):
            yield node.name, marks
            for part in (part for decorator in node.decorator_list for part in ast.walk(decorator)):
                if isinstance(part, ast.keyword) and part.arg == "marks":
                    yield node.name, marks | _marks(part.value)


def _marks(mark: ast.expr) -> set[str]:
    """The names of a mark, or of several; not those of a parameter's cases."""
    marks = mark.elts if isinstance(mark, ast.List | ast.Tuple) else [mark]
    return {ast.unparse(one).split("(")[0].removeprefix("pytest.mark.") for one in marks}
