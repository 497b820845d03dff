"""``TF_POPLAR_FLAGS``: what programs switch on by the environment. They are read when the front end is installed, and
again when a program changed the variable.

Source of names: the SDK's documentation of TF_POPLAR_FLAGS. Flags about threads, schedules and checks of a compiler
mean nothing here and are accepted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import TensorType

VARIABLE = "TF_POPLAR_FLAGS"
CATEGORIES = ("seed", "infeed", "outfeed", "hostembedding", "parameters")
_ACCEPTED = {
    "while_loop_brute_force_max_trip_count", "max_compilation_threads", "max_infeed_threads", "dump_schedule_as_dot",
    "tensor_map_file_path", "fallback_scheduler", "allow_nans", "use_on_demand", "on_demand_device_poll_time",
    "on_demand_device_timeout", "ipu_model_tiles", "sync_replica_start", "enable_hlo_verifier",
    "disable_poplar_version_check", "help", "null_data_feed", "show_progress_bar", "log_cycle_count",
    "save_interval_report", "save_vertex_graph", "executable_cache_path", "use_synthetic_data",
    "synthetic_data_initializer", "synthetic_data_categories", "use_ipu_model", "poplar_log_level",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoplarFlags:
    """The flags that have an effect. ``synthetic``: categories whose data do not cross between host and IPU;
    ``initializer``: what stands in for them: a number, ``uniform``, ``normal``, or nothing; ``counted_runs``: runs of a
    program whose cycles are printed.
    """

    synthetic: frozenset[str] = frozenset()
    initializer: str = ""
    cache_directory: str = ""
    ipu_model: bool = False
    counted_runs: int = 0
    vertex_graphs: str = ""
    """The folder for a list of what each compiled program computes."""
    interval_reports: str = ""
    """The folder for a table of the memory of each compiled program's tiles."""


def read_flags(environ: Mapping[str, str] | None = None) -> PoplarFlags:
    """The flags in the environment. UsageError for an unknown flag, category or initializer."""
    values: dict[str, str] = {}
    for word in shlex.split(environment(environ).get(VARIABLE, "")):
        name, _, value = word.removeprefix("-").removeprefix("-").partition("=")
        if not word.startswith("-") or name not in _ACCEPTED:
            raise UsageError(
                f"{VARIABLE} has an unknown flag: {word}", hint=f"Leave it out: export {VARIABLE}='...'"
            )
        values[name] = value
    return PoplarFlags(
        _categories(values),
        _initializer(values.get("synthetic_data_initializer", "")),
        values.get("executable_cache_path", ""),
        _on(values.get("use_ipu_model")),
        _number(values.get("log_cycle_count", "") or "0"),
        values.get("save_vertex_graph", ""),
        values.get("save_interval_report", ""),
    )


def _on(value: str | None) -> bool:
    return value is not None and value.lower() not in ("false", "0")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{VARIABLE}: --log_cycle_count must be a number, not {text!r}.")
    return int(text)


def _categories(values: Mapping[str, str]) -> frozenset[str]:
    chosen = values.get("synthetic_data_categories")
    if chosen is None:
        return frozenset(CATEGORIES) if _on(values.get("use_synthetic_data")) else frozenset()
    names = [name.strip().lower().replace("_", "") for name in chosen.split(",") if name.strip()]
    unknown = [name for name in names if name not in CATEGORIES]
    if unknown:
        raise UsageError(
            f"{VARIABLE}: {unknown[0]!r} is no category of synthetic data.",
            hint=f"There are {', '.join(CATEGORIES)}.",
        )
    return frozenset(names)


def _initializer(text: str) -> str:
    if text in ("", "uniform", "normal", "random"):
        return text
    try:
        float(text)
    except ValueError:
        raise UsageError(
            f"{VARIABLE}: --synthetic_data_initializer must be a number, uniform or normal, not {text!r}."
        ) from None
    return text


def synthetic_elements(
    types: Mapping[str, TensorType], initializer: str, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Elements of an infeed whose data do not come from the host, without end."""
    generator = np.random.default_rng(seed)
    while True:
        yield {name: _drawn(kind, initializer, generator) for name, kind in types.items()}


def _drawn(kind: TensorType, initializer: str, generator: np.random.Generator) -> np.ndarray:
    shape = tuple(int(size or 0) for size in kind.shape or ())
    dtype = np.dtype(kind.dtype or np.float32)
    if not initializer:
        return np.zeros(shape, dtype)
    if initializer in ("uniform", "random"):
        return np.asarray(generator.uniform(size=shape)).astype(dtype)
    if initializer == "normal":
        return np.asarray(generator.normal(size=shape)).astype(dtype)
    return np.full(shape, float(initializer)).astype(dtype)


def unsent(infeeds: Iterable[str], outfeeds: Iterable[str]) -> tuple[str, ...]:
    """Of the tensors of infeeds and outfeeds those that need no buffer on the IPU: their data do not cross, and what
    stands in for them is nothing or one number. Data that are drawn lie on the IPU.
    """
    current = flags()
    drawn = current.initializer in ("uniform", "normal", "random")
    names = [*infeeds] if "infeed" in current.synthetic and not drawn else []
    return tuple(sorted([*names, *(outfeeds if "outfeed" in current.synthetic else ())]))


class CurrentFlags:
    """The flags of this process. Programs also set the variable once they have read their own options."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._read = PoplarFlags()

    def __call__(self) -> PoplarFlags:
        """The flags, read when the variable changed."""
        text = environment().get(VARIABLE, "")
        if text != self._text:
            self._read = read_flags()
            self._text = text
        return self._read


flags = CurrentFlags()
"""The flags of this process."""
