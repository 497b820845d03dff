"""Names with a meaning: scopes of traced operations, and buffers and tensors of an executable.

**Scopes** say IPU, pipeline stage, operator and recomputation. A front end traces each operator under
``jax.named_scope``: ``ipu:1/stage:0/layer3/MatMul:0``. JAX's transformations keep these names and wrap them:
``transpose(jvp(ipu:1))/stage:0/layer3/MatMul:0``. `parse_scope` reads such a text:

    >>> parse("transpose(jvp(ipu:1))/stage:0/layer3/MatMul:0").ipu
    1

The innermost IPU, stage and cut count. A builder's label ends with the operator's type and a number (``MatMul:0``,
``MatMul:0/1``); below any other label a scope says the type: ``encoder/op:MatMul:0``.

**Buffers.** Front ends, compiler and machines agree on these names. A name is a prefix and the name of what the buffer
holds, so that a reader of an executable sees what a buffer is.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Iterator

from podrun.core.errors import InternalError, PodrunError
from podrun.core.quick_dataclass import dataclass

BACKWARD = "transpose("
"""Begins the scope of every backward equation."""
RECOMPUTED = "checkpoint("
"""In the scope of every copy of a forward equation that recomputation makes."""
RESTORE = "transpose(restore)"
"""Scope of a forward value that is computed together with the backward work of its stage."""
LOCAL = "anew"
"""Innermost scope of equations that every segment reading their results computes for itself."""
CLIPPED = "clipped_half"
"""The primitive of JAX that replaces infinite halves. Its results have none."""
ROUNDING = "rounded_onto_halves"
"""The function in StableHLO that rounds stochastically onto the halves."""
RANDOM_WORDS = "random_words_of_counters"
"""The function in StableHLO that computes random words."""

_TRANSFORMATIONS = frozenset(
    {
        *("transpose", "jvp", "vmap", "checkpoint", "remat", "rematted_computation"),
        *("custom_jvp", "custom_vjp"),
    }
)
_PARENTHESES = re.compile(r"(\w*)\(|\)")
_LOCAL = re.compile(rf"(?:(?:jvp|vmap)\()*{LOCAL}\)*")
_PLACE = re.compile(r"(ipu|stage|cut):(\d+)")
_KIND = re.compile(r"op:(\w+):0")
_TYPED = re.compile(r"(?:op:)?([A-Z][A-Za-z0-9]*):\d+")
_CUT = re.compile(r"/cut:\d+\b")


@dataclass(frozen=True, slots=True)
class ScopeOperator:
    """The operator in whose scope an equation stands: its ``label`` with the names around it, and its ONNX type."""

    label: str
    kind: str


@dataclass(frozen=True, slots=True)
class Scope:
    """What the scope of an equation says. None for a place that it does not name."""

    names: tuple[str, ...]
    """The scope's parts without transformations, places and types: the layer's name."""
    ipu: int | None = None
    stage: int | None = None
    cut: int | None = None
    """The pipeline stage that the operator would have, in a program without stages."""
    operator: ScopeOperator | None = None
    backward: bool = False
    recomputed: bool = False
    restored: bool = False
    """True iff it is computed with the backward work of its stage (`RESTORE`)."""

    @property
    def layer(self) -> str:
        """The layer's name, or ``(no name)``."""
        return "/".join(self.names) or "(no name)"

    def within(self, labels: frozenset[str]) -> str | None:
        """The longest of ``labels`` that the layer's name begins with; None if there is none.

        A number behind a label belongs to another operator: ``MatMul:0/1`` is not in ``MatMul:0``.
        """
        known = _by_names(labels)
        for end in range(len(self.names), 0, -1):
            if self.names[:end] in known:
                return known[self.names[:end]]
            if self.names[end - 1].isdecimal():
                return None
        return None


@functools.lru_cache(maxsize=64)
def _by_names(labels: frozenset[str]) -> dict[tuple[str, ...], str]:
    """Labels by their parts, as `Scope.names` has them."""
    return {tuple(part for part in label.split("/") if part): label for label in sorted(labels)}


@functools.lru_cache(maxsize=1 << 16)
def parse_scope(text: str) -> Scope:
    """Read the text of a scope, parts separated by ``/``. Any text is a scope; the empty one says nothing."""
    parts = [part for part in unwrapped(text).split("/") if part]
    places: dict[str, int] = {}
    names: list[str] = []
    for part in parts:
        place = _PLACE.fullmatch(part)
        if place is not None:
            places[place[1]] = int(place[2])
        elif not _KIND.fullmatch(part):
            names.append(part)
    return Scope(
        tuple(names),
        places.get("ipu"),
        places.get("stage"),
        places.get("cut"),
        _operator(parts),
        backward=BACKWARD in text,
        recomputed=RECOMPUTED in text,
        restored=RESTORE in text,
    )


def unwrapped(text: str) -> str:
    """``text`` without JAX's transformations; parentheses of other names stay."""
    kept: list[str] = []
    wrappers: list[bool] = []
    end = 0
    for parenthesis in _PARENTHESES.finditer(text):
        opens = parenthesis[0] != ")"
        if opens:
            wrappers.append(parenthesis[1] in _TRANSFORMATIONS)
        is_wrapper = wrappers[-1] if opens else bool(wrappers) and wrappers.pop()
        if is_wrapper:
            kept.append(text[end : parenthesis.start()])
            end = parenthesis.end()
    return "".join([*kept, text[end:]])


def _operator(parts: list[str]) -> ScopeOperator | None:
    """The innermost operator whose type is known. A builder's second operator of a name is ``MatMul:0/1``."""
    for end in range(len(parts), 0, -1):
        typed = _TYPED.fullmatch(parts[end - 1])
        if typed is not None:
            last = end + 1 if end < len(parts) and parts[end].isdecimal() else end
            return ScopeOperator("/".join(parts[:last]), typed[1])
    return None


def operator_scopes(label: str, kind: str) -> tuple[str, ...]:
    """The scopes of an operator: its label, and its type unless the label ends with a type and a number."""
    parts = label.split("/")
    if len(parts) > 1 and parts[-1].isdecimal():
        parts.pop()
    typed = _TYPED.fullmatch(parts[-1])
    return (label,) if typed is not None and not parts[-1].startswith("op:") else (label, f"op:{kind}:0")


def place_scopes(ipu: int | None = None, stage: int | None = None, cut: int | None = None) -> tuple[str, ...]:
    """The scopes of an operator's place, from the outside in."""
    places = {"ipu": ipu, "stage": stage, "cut": cut}
    return tuple(f"{kind}:{number}" for kind, number in places.items() if number is not None)


def recomputing(text: str) -> str:
    """The scope of a copy, in the backward pass, of an equation whose scope is ``text``."""
    return f"{BACKWARD}{RECOMPUTED}{text}))"


def without_cuts(text: str) -> str:
    """``text`` without cuts, which stand below an IPU and are not part of any report."""
    return _CUT.sub("", text)


def is_local(part: str) -> bool:
    """True iff the innermost part of a scope is `LOCAL`, in the forward pass."""
    return _LOCAL.fullmatch(part) is not None


WHOLE = "arena:"
"""``arena:NAME``: a whole arena."""
SLICE = "arena_slice:"
"""``arena_slice:NAME``: this machine's slice of an arena."""
INPUT = "in:"
"""``in:NAME``: what a LoadStream of input NAME fills."""
ANCHOR = "out:"
"""``out:NAME``: what a StoreStream hands over for anchor NAME."""
CROSSING = "value:"
"""``value:NUMBER`` or ``value:NAME``: a temporary that crosses between the pieces of a micro-batch."""
GRADIENT_SUM = "gradient:"
"""``gradient:WEIGHT``: the gradient accumulator of a weight, a member of a gradient arena."""
GRADIENT_COUNT = "averaged:"
"""``averaged:WEIGHT``: the number of micro-batches in the accumulator of a weight."""
STATISTICS = "statistics:"
"""``statistics:TENSOR``: what automatic loss scaling counts of a gradient."""
RETURNED = "updated:"
"""``updated:NAME``: a value from another machine, until it is put into its arena."""
EXCHANGE = "exchange:"
"""``exchange:PIECE:NUMBER``: the arena of one exchange inside a piece."""
DIGESTS = "digests:"
"""Read by the host: digests of the weights and optimizer state on each IPU of a machine, ``[IPUs, 2]`` of uint64: the
IPU's index in the partition, and 64 bits."""
KEYS = "keys"
"""Key data ``[replicas, 2]`` of one micro-batch, where a piece is split and cannot move the seed on by itself."""

GRADIENT_ANCHOR = "Gradient___"
"""Anchor: the gradient of a tensor, for each replica and micro-batch."""
UPDATED_ANCHOR = "UpdatedVar___"
"""Anchor: a weight after the update of its batch."""
REDUCED_ANCHOR = "FinalReducedGradient___"
"""Anchor: the gradient that a batch's update sees, reduced over replicas and micro-batches, still scaled."""
NORM_ANCHOR = "GlobalNorm___"
"""Anchor: the norm that a joint update clips by; the number of its group follows."""


def input_buffer(stream: str) -> str:
    """The buffer that a LoadStream of an input fills."""
    return f"{INPUT}{stream}"


def anchor_buffer(anchor: str) -> str:
    """The buffer whose content a StoreStream hands over for an anchor."""
    return f"{ANCHOR}{anchor}"


def gradient_buffer(weight: str) -> str:
    """The gradient accumulator of a weight: a member of its group's gradient arena."""
    return f"{GRADIENT_SUM}{weight}"


def count_buffer(weight: str) -> str:
    """How many micro-batches the accumulator of a weight holds: float32 ``[1]``."""
    return f"{GRADIENT_COUNT}{weight}"


def statistics_buffer(tensor: str) -> str:
    """The counts of one tracked gradient over a batch: float32 ``[2]``, below the edge and not."""
    return f"{STATISTICS}{tensor}"


# --- errors from inside a library -------------------------------------------------------------------------------------

_LIBRARIES = ("podrun", "jax", "jaxlib", "numpy", "onnx", "ml_dtypes", "opt_einsum", "scipy")
_EQUATIONS = ("equation", "eqn")
"""What frames that work on an equation call it: podrun's, and JAX's."""


@contextlib.contextmanager
def library_errors_named(doing: str) -> Iterator[None]:
    """What a library raises inside becomes podrun's error: it says what was done, at which operator, and what helps.

    Errors that are podrun's pass, and so do those that the program's own functions raise.
    """
    try:
        yield
    except (PodrunError, MemoryError):
        raise
    except Exception as error:
        frames = _frames(error)
        if not frames or not _is_inside(frames[-1]):
            raise
        scope = parse_scope(
            next((frame_scope for frame in reversed(frames) if (frame_scope := _scope_of(frame))), "")
        )
        label = scope.operator.label if scope.operator is not None else "/".join(scope.names)
        at = f" at {label!r}{' (its gradient)' if scope.backward else ''}" if label else ""
        said = str(error).strip().partition("\n")[0] or "no message"
        raise InternalError(
            f"{doing} failed{at}, inside a library: {type(error).__name__}: {said}",
            hint="Give that operator other sizes or attributes, or take it out of the model to see whether the rest "
            "compiles, and report it: PODRUN_TRACEBACK=full shows the frames.",
        ) from error


def _frames(error: BaseException) -> list[types.FrameType]:
    """The frames that an error went through, the innermost last."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    return frames


def _is_inside(frame: types.FrameType) -> bool:
    """Whether a frame is podrun's or of a library that computes for it."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def _scope_of(frame: types.FrameType) -> str:
    """The scope of the equation, or the name of the operator, that a frame works on; empty if it works on none."""
    if label := getattr(frame.f_locals.get("node"), "label", ""):
        return str(label)
    for name in _EQUATIONS:
        source = getattr(frame.f_locals.get(name), "source_info", None)
        if source is not None and str(getattr(source, "name_stack", "")):
            return str(source.name_stack)
    return ""


def in_float32(tensor: str) -> str:
    """The name, in a Program, of the float32 form of a half tensor (`podrun.runtime.widening`)."""
    return f"in float32: {tensor}"


ASSERTED_ANCHOR = "podrun.asserted"
"""The name of the output that no client sees: whether a program's assertions held."""
