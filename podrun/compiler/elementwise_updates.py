"""Updates of state that replicas share, as far as they are arithmetic on each element.

A program without a loss of its own (TensorFlow's: it differentiates and updates by itself) says which state stays equal
on all replicas. `find_updates` reads from its piece how new values come about. Variables whose new values need one sum
over all replicas, the same elements of each other, and numbers, form an `ElementwiseUpdate`: weights with their slots,
such as Adam's moments. Its elements may be computed in any order, so machines can share the work by slices
(`podrun.compiler.shared_updates`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from podrun.compiler.export import TracedPiece
from podrun.compiler.model_collectives import sum_p
from podrun.core.errors import present
from podrun.core.quick_dataclass import dataclass

Atom = Var | Literal
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: np.divide(a, b),
    "neg": lambda _, a: -a,
    "abs": lambda _, a: np.abs(a),
    "sign": lambda _, a: np.sign(a),
    "sqrt": lambda _, a: np.sqrt(a),
    "rsqrt": lambda _, a: np.divide(1, np.sqrt(a)),
    "square": lambda _, a: a * a,
    "integer_pow": lambda params, a: np.power(np.float64(a), params["y"]),
    "pow": lambda _, a, b: np.power(np.float64(a), b),
    "exp": lambda _, a: np.exp(a),
    "log": lambda _, a: np.log(a),
    "tanh": lambda _, a: np.tanh(a),
    "max": lambda _, a, b: np.maximum(a, b),
    "min": lambda _, a, b: np.minimum(a, b),
    "eq": lambda _, a, b: np.equal(a, b),
    "ne": lambda _, a, b: np.not_equal(a, b),
    "gt": lambda _, a, b: np.greater(a, b),
    "ge": lambda _, a, b: np.greater_equal(a, b),
    "lt": lambda _, a, b: np.less(a, b),
    "le": lambda _, a, b: np.less_equal(a, b),
    "select_n": lambda _, which, *cases: np.choose(np.asarray(which).astype(int), cases, mode="clip"),
    "convert_element_type": lambda params, a: np.asarray(a).astype(params["new_dtype"]),
}
"""What an update may be made of, by primitive: functions of the equation's parameters and of numbers in NumPy."""
TRIALS = np.array([-0.5, 0, 0.5, 1, 2], np.float32)
"""What the numbers of an update may be when it is tried out."""
MOST_EQUATIONS = 256
"""Equations of an update beyond which nothing is looked for."""

Reference = tuple[Any, ...]
"""An operand: ``("literal", dtype, value)``, ``("number", its number)``, ``("variable", position)``, ``("total",)`` or
``("step", index)``."""


@dataclass(frozen=True, slots=True)
class ElementwiseUpdate:
    """New values of ``variables``, of one size. ``total``: the equation of the sum over all replicas that they need.
    ``steps``: equations with their operands; ``results``: the new value of each variable. ``key``: equal for updates
    that do the same. ``covered``: the identities of the equations that compute them.
    """

    variables: tuple[str, ...]
    total: JaxprEqn
    steps: tuple[tuple[JaxprEqn, tuple[Reference, ...]], ...]
    results: tuple[Reference, ...]
    key: tuple[Any, ...]
    covered: frozenset[int]

    def apply(
        self,
        variables: Sequence[Any],
        total: object,
        numbers: Mapping[int, Any],
        bind: Callable[[JaxprEqn, Sequence[Any]], Any],
    ) -> list[Any]:
        """New values for arrays of any shape. ``bind`` computes an equation."""
        values: list[Any] = []

        def value(reference: Reference) -> Any:
            match reference:
                case ("literal", kind, number):
                    return np.dtype(kind).type(number)
                case ("number", number):
                    return numbers[number]
                case ("variable", position):
                    return variables[position]
                case ("step", index):
                    return values[index]
            return total

        for equation, operands in self.steps:
            values.append(bind(equation, [value(operand) for operand in operands]))
        return [value(result) for result in self.results]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers (see `Numbers`) that steps and results read, in ascending order."""
        read = [*(r for _, operands in self.steps for r in operands), *self.results]
        return tuple(sorted({r[1] for r in read if r[0] == "number"}))

    @property
    def total_shape(self) -> tuple[int, ...]:
        """The shape of the sum; variables may have others of the same size."""
        return _axes(self.total.outvars[0])

    @property
    def keeps_zeros_finite(self) -> bool:
        """Whether zeros, as padding has, give finite numbers where other elements do, and for numbers of 0.5."""

        def bind(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
            return ARITHMETIC[equation.primitive.name](equation.params, *operands)

        def finite(element: float, numbers: Mapping[int, Any]) -> list[Any]:
            value = np.float32(element)
            results = self.apply([value] * len(self.variables), value, numbers, bind)
            return [np.isfinite(np.asarray(result, np.float64)) for result in results]

        spread = {n: TRIALS.reshape(-1, *[1] * (at % 5)) for at, n in enumerate(self.numbers)}
        with np.errstate(all="ignore"):
            half = finite(0, dict.fromkeys(self.numbers, np.float32(0.5)))
            pairs = zip(finite(0, spread), finite(0.25, spread), strict=True)
            return all(map(np.all, half)) and all(np.all(zeros | ~others) for zeros, others in pairs)


@dataclass(slots=True)
class _Cone:
    """What a variable's new value is computed from."""

    variables: set[str] = field(default_factory=set)
    totals: dict[int, JaxprEqn] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Numbers:
    """Values without axes, numbered by what they are computed from: each ``RATE * sqrt(1 - POWER)`` that a program
    computes anew for a weight has one number. ``first``: a variable of the jaxpr for each.
    """

    inputs: Mapping[Var, str]
    makers: Mapping[Var, JaxprEqn]
    first: list[Any] = field(default_factory=list)
    _of_key: dict[Any, int] = field(default_factory=dict)
    _of_var: dict[Var, int] = field(default_factory=dict)

    def number(self, atom: Var) -> int:
        """The number of a variable without axes."""
        if atom not in self._of_var:
            key = self._key(atom)
            if key not in self._of_key:
                self._of_key[key] = len(self.first)
                self.first.append(atom)
            self._of_var[atom] = self._of_key[key]
        return self._of_var[atom]

    def _key(self, atom: Var) -> Any:
        if atom in self.inputs:
            return self.inputs[atom]
        maker = self.makers.get(atom)
        name = "" if maker is None else maker.primitive.name
        if maker is not None and name in ("name", "copy", "reshape") and isinstance(maker.invars[0], Var):
            return "number", self.number(maker.invars[0])
        if maker is None or name not in ARITHMETIC or any(getattr(a.aval, "shape", ()) for a in maker.invars):
            return id(atom)
        operands = [
            _literal(a) if isinstance(a, Literal) else ("number", self.number(a)) for a in maker.invars
        ]
        return name, str(maker.params), str(atom.aval.dtype), *operands  # type: ignore[attr-defined]


def _literal(atom: Literal) -> Reference:
    value = np.asarray(atom.val)
    return "literal", str(value.dtype), value.item()


class UpdateReader:
    """Reads updates of ``shared`` variables from a piece with sums over replicas in it."""

    def __init__(self, piece: TracedPiece, shared: Collection[str]) -> None:
        self.piece, self.shared = piece, shared
        self.jaxpr = piece.jaxpr.jaxpr
        self.inputs = dict(zip(self.jaxpr.invars, piece.inputs, strict=True))
        self.makers: dict[Var, JaxprEqn] = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        self.readers: dict[Any, list[JaxprEqn]] = defaultdict(list)
        for equation in self.jaxpr.eqns:
            for atom in equation.invars:
                if not isinstance(atom, Literal):
                    self.readers[atom].append(equation)
        self.results = dict(zip(piece.outputs, self.jaxpr.outvars, strict=True))
        self.numbers = Numbers(self.inputs, self.makers)
        for scalar in (v for e in self.jaxpr.eqns for v in e.outvars if not _axes(v)):
            self.numbers.number(scalar)  # In order: long chains recurse too deep.

    def find_updates(self) -> list[ElementwiseUpdate]:
        """The updates that machines may share, in the order of the piece's outputs."""
        cones = {}
        for name in self.piece.outputs:
            atom = self.results[name]
            if name in self.shared and not isinstance(atom, Literal) and _axes(atom):
                cone = self._cone(atom)
                if cone is not None and cone.totals:
                    cones[name] = cone
        together = [self._update(names, cones) for names in _connected(cones)]
        return [update for update in together if update is not None and update.keeps_zeros_finite]

    def _cone(self, result: Var) -> _Cone | None:
        """What a new value is computed from; None if by anything else than arithmetic on each element."""
        cone, size = _Cone(), _size(result)
        waiting: list[Any] = [result]
        seen: set[Var] = set()
        while waiting:
            atom = waiting.pop()
            if isinstance(atom, Literal) or not _axes(atom) or atom in seen:
                continue
            seen.add(atom)
            if _size(atom) != size:
                return None
            if atom in self.inputs:
                cone.variables.add(self.inputs[atom])
                continue
            maker = self.makers.get(atom)
            if maker is None:
                return None
            if maker.primitive is sum_p:
                cone.totals[id(maker)] = maker
                continue
            passed = list(self._passed_on(maker))
            if not passed and maker.primitive.name not in ARITHMETIC:
                return None
            cone.covered.update(id(e) for e, _ in passed or [(maker, None)])
            waiting += [passed[-1][1]] if passed else maker.invars
            if len(cone.covered) > MOST_EQUATIONS:
                return None
        return cone

    def _passed_on(self, maker: JaxprEqn) -> Iterator[tuple[JaxprEqn, Any]]:
        """The equations, from the last to the first, that hand the elements of a value on as they are, each with its
        operand; none if an equation does more.
        """
        operand, name = maker.invars[0] if maker.invars else None, maker.primitive.name
        if operand is None or isinstance(operand, Literal):
            if name == "broadcast_in_dim":
                yield maker, operand
        elif (
            name in ("name", "copy")
            or (name == "reshape" and maker.params["dimensions"] is None)
            or (name == "broadcast_in_dim" and not _axes(operand))
        ):
            yield maker, operand
        elif name == "squeeze" and maker.params["dimensions"] == (0,):
            cut = self.makers.get(operand)
            if cut is not None and _spreads(cut, 1):  # Of one replica: there is nothing to cut.
                yield from ((maker, operand), (cut, cut.invars[0]))
                return
            spread = None if cut is None else self.makers.get(cut.invars[0])  # type: ignore[arg-type]
            if cut is not None and spread is not None and _first_of_equal(cut, spread):
                yield from ((maker, operand), (cut, cut.invars[0]), (spread, spread.invars[0]))

    def _update(self, names: Sequence[str], cones: Mapping[str, _Cone]) -> ElementwiseUpdate | None:
        """The update of variables that depend on each other; None if machines cannot share it."""
        own = [cones[name] for name in names]
        totals = {key: e for cone in own for key, e in cone.totals.items()}
        covered = frozenset().union(*(cone.covered for cone in own))
        read = set().union(*(cone.variables for cone in own))
        sizes = {_size(self.results[name]) for name in names}
        if len(totals) != 1 or len(sizes) != 1 or not read <= set(names):
            return None
        (total,) = totals.values()
        if self._is_read_elsewhere(total, covered, names):
            return None
        alone = {name: repr(_Writer(self, (name,)).key) for name in names}
        order = tuple(sorted(names, key=lambda name: (alone[name], self.piece.outputs.index(name))))
        writer = _Writer(self, order)
        kinds = tuple(str(self.results[name].aval.dtype) for name in order)
        return ElementwiseUpdate(
            order, total, tuple(writer.steps), tuple(writer.results), (writer.key, kinds), covered
        )

    def _is_read_elsewhere(self, total: JaxprEqn, covered: Collection[int], names: Sequence[str]) -> bool:
        """Whether anything but the new values of ``names`` is computed from a sum, or is one of its parts."""
        moving = set(total.outvars)
        for equation in self.jaxpr.eqns:
            if id(equation) in covered and not moving.isdisjoint(
                a for a in equation.invars if not isinstance(a, Literal)
            ):
                moving.update(equation.outvars)
        if any(id(reader) not in covered for variable in moving for reader in self.readers[variable]):
            return True
        outgoing = Counter(a for a in self.jaxpr.outvars if not isinstance(a, Literal) and a in moving)
        own = Counter(self.results[name] for name in names if self.results[name] in moving)
        return outgoing != own

    def reference(
        self, atom: Atom, position: Mapping[str, int], steps: Mapping[Any, int]
    ) -> Reference | None:
        """How a step names an operand; None for one that has to be a step before."""
        while True:
            if isinstance(atom, Literal):
                return _literal(atom)
            if not _axes(atom):
                return "number", self.numbers.number(atom)
            if atom in self.inputs:
                return "variable", position.get(self.inputs[atom], -1)
            maker = self.makers[atom]
            if maker.primitive is sum_p:
                return ("total",)
            passed = list(self._passed_on(maker))
            if not passed:
                return ("step", steps[atom]) if atom in steps else None
            atom = passed[-1][1]

    def source(self, atom: Var) -> Var:
        """The variable whose elements another one hands on."""
        while passed := list(self._passed_on(self.makers[atom])):
            atom = passed[-1][1]
        return atom


class _Writer:
    """Writes the new values of variables as steps: each after those that it reads."""

    def __init__(self, reader: UpdateReader, names: Sequence[str]) -> None:
        self._reader = reader
        self._position = {name: place for place, name in enumerate(names)}
        self._place: dict[Any, int] = {}
        self.steps: list[tuple[JaxprEqn, tuple[Reference, ...]]] = []
        self.results = [self._take(reader.results[name]) for name in names]

    @property
    def key(self) -> tuple[Any, ...]:
        """What the steps do, without the names of variables."""
        steps = [(e.primitive.name, str(e.params), operands) for e, operands in self.steps]
        return tuple(steps), tuple(self.results)

    def _take(self, result: Var) -> Reference:
        waiting: list[Any] = [result]
        while waiting:
            atom = waiting[-1]
            reference = self._reader.reference(atom, self._position, self._place)
            if reference is not None:
                waiting.pop()
                continue
            source = self._reader.source(atom)
            maker = self._reader.makers[source]
            operands = [self._reader.reference(a, self._position, self._place) for a in maker.invars]
            missing = [a for a, r in zip(maker.invars, operands, strict=True) if r is None]
            if missing:
                waiting += missing
                continue
            self._place[source] = len(self.steps)
            self.steps.append((maker, tuple(r for r in operands if r is not None)))
        reference = self._reader.reference(result, self._position, self._place)
        return present(reference, "a value that steps compute is that of a step")


def _spreads(equation: JaxprEqn, rows: int | None = None) -> bool:
    """Whether an equation gives equal rows, each of them its operand; so many ``rows``."""
    if equation.primitive.name != "broadcast_in_dim":
        return False
    shape, row = _axes(equation.outvars[0]), _axes(equation.invars[0])
    axes = tuple(range(1, len(shape)))
    whole = shape[1:] == row and tuple(equation.params["broadcast_dimensions"]) == axes
    return whole and shape[0] == (shape[0] if rows is None else rows)


def _first_of_equal(cut: JaxprEqn, spread: JaxprEqn) -> bool:
    """Whether ``cut`` takes the first row of rows that ``spread`` made equal."""
    if cut.primitive.name != "slice" or not _spreads(spread):
        return False
    row, starts = _axes(spread.invars[0]), cut.params["start_indices"]
    return not any(starts) and cut.params["limit_indices"] == (1, *row)


def _connected(cones: Mapping[str, _Cone]) -> list[list[str]]:
    """The variables, those together whose new values read one another or the same sum."""
    groups: list[tuple[set[Any], list[str]]] = []
    for name, cone in cones.items():
        links = {name, *cone.variables, *cone.totals}
        joined = [group for group in groups if not group[0].isdisjoint(links)]
        groups = [group for group in groups if group[0].isdisjoint(links)]
        names = [item for _, members in joined for item in members]
        groups.append((links.union(*(links_ for links_, _ in joined)), [*names, name]))
    return [names for _, names in groups]


def _axes(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _size(atom: Atom) -> int:
    return int(np.prod(_axes(atom), dtype=np.int64))
