"""`CompilerOptions`: names and defaults of the SDK's compiler.

Options of `WITHOUT_EFFECT` change neither numbers nor what is modelled: any value is accepted. What podrun cannot do as
asked is refused by `CompilerOptions.check`, with the option's name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any

from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.quick_dataclass import dataclass

WITHOUT_EFFECT = (
    *("enable_prefetch_datastreams", "enable_gather_simplifier", "show_compilation_progress_bar"),
    *("enable_multi_stage_reduce", "rearrange_anchors_on_host", "rearrange_streams_on_host"),
    *("group_host_sync", "enable_non_stable_softmax", "stream_buffering_depth", "outline_threshold"),
    *("time_limit_scheduler", "swap_limit_scheduler", "transitive_closure_optimization_threshold"),
    *("enable_pad_conv_channel", "use_128bit_conv_unit_load", "enable_fast_reduce"),
    *("subgraph_copying_strategy", "create_host_transferable_tensor_with_offset"),
    *("enable_efficient_overlap_io_topo_cons", "enable_model_fusion"),
)
"""Options that are accepted and do nothing. A fused model needs no option: it is one model."""

TRANSFORM_CHECKPOINTS = ("Fwd0", "Fwd1", "Bwd0", "Prealias", "MainLoops", "Final")
"""Places of PopART's compiler at which it applies transforms of a program's own."""


@dataclass(slots=True)
class CompilerOptions:
    """Options of `Compiler`; names and defaults are the SDK's. ``popart_options``: fields of SessionOptions."""

    num_ipus: int = 1
    ipu_version: str = ""
    batches_per_step: int = 1
    partials_type: str = "half"
    available_memory_proportion: float = 0.6
    num_io_tiles: int = 0
    constant_weights: bool = True
    enable_outlining: bool = True
    enable_pipelining: bool = False
    virtual_graph_mode: str = "off"
    virtual_graph_split_ratios: Sequence[float] = ()
    enable_engine_caching: bool = False
    cache_path: str = ""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    custom_patterns: str | Sequence[str] = ""
    """Patterns to switch on, or off with ``:0``: ``Name,Other:0``."""
    custom_transform_applier_settings: str | Mapping[str, Sequence[str]] = ""
    opaque_blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes that the compiled file carries, by name."""
    serialize_ir: bool = False
    serialized_ir_dest: str = ""
    compilation_progress_logger: Callable[[int, int], Any] | None = None
    """Called with steps done and steps in all."""
    enable_model_fusion: bool = False
    enable_prefetch_datastreams: bool = True
    enable_gather_simplifier: bool = True
    show_compilation_progress_bar: bool = True
    enable_multi_stage_reduce: bool = True
    rearrange_anchors_on_host: bool = True
    rearrange_streams_on_host: bool = False
    enable_pad_conv_channel: bool = False
    use_128bit_conv_unit_load: bool = False
    enable_fast_reduce: bool = False
    group_host_sync: bool = False
    enable_non_stable_softmax: bool = False
    create_host_transferable_tensor_with_offset: bool = False
    enable_efficient_overlap_io_topo_cons: bool = False
    stream_buffering_depth: int = 1
    outline_threshold: float = 1.0
    subgraph_copying_strategy: int = 0
    time_limit_scheduler: float = 1e9
    swap_limit_scheduler: float = 1e9
    transitive_closure_optimization_threshold: int = 100000
    popart_options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> CompilerOptions:
        """Options by name. UsageError for a name that does not exist, or a value of another type."""
        import difflib

        known = {f.name for f in fields(CompilerOptions)}
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, 1)
                raise UsageError(
                    f"there is no compiler option {name!r}",
                    hint=f"Did you mean {close[0]}?"
                    if close
                    else f"The options are {', '.join(sorted(known))}.",
                )
        chosen = CompilerOptions(**options)
        chosen.check()
        return chosen

    def check(self) -> None:
        """UsageError for a value of another type or out of range, UnsupportedError for what podrun does not have."""
        defaults = CompilerOptions()
        for one in fields(self):
            value, default = getattr(self, one.name), getattr(defaults, one.name)
            if one.name not in _OF_SEVERAL_TYPES and not _fits(value, default):
                raise UsageError(f"the compiler option {one.name} is {_type_name(default)}, not {value!r}")
        for name in ("num_ipus", "batches_per_step"):
            if getattr(self, name) < 1:
                raise UsageError(f"the compiler option {name} is above 0, not {getattr(self, name)}")
        if not 0 <= self.num_io_tiles < 1472:
            raise UsageError(f"the compiler option num_io_tiles is from 0 to 1471, not {self.num_io_tiles}")
        if self.partials_type not in ("half", "float"):
            raise UsageError(
                f"the compiler option partials_type is half or float, not {self.partials_type!r}"
            )
        if self.ipu_version not in ("", "ipu2", "ipu21"):
            raise UsageError(f"the compiler option ipu_version is ipu2 or ipu21, not {self.ipu_version!r}")
        self._check_transforms()
        self.patterns()

    def _check_transforms(self) -> None:
        for checkpoint, names in self.transforms().items():
            if checkpoint not in TRANSFORM_CHECKPOINTS:
                raise UsageError(
                    f"custom_transform_applier_settings: there is no checkpoint {checkpoint!r}",
                    hint=f"The checkpoints are {', '.join(TRANSFORM_CHECKPOINTS)}.",
                )
            if not isinstance(names, (list, tuple)):
                raise UsageError(
                    f"custom_transform_applier_settings: {checkpoint} takes a list of names, not {names!r}"
                )
            if names:
                raise UnsupportedError(
                    f"custom_transform_applier_settings: {names[0]!r} at {checkpoint}: transforms are compiled code of "
                    "PopART, which cannot run here",
                    hint="Change the model before: poprt --custom_pass_config my_pass.py --passes NAME.",
                )

    def patterns(self) -> dict[str, bool]:
        """Patterns by name, and whether each is on. UsageError for words that are none."""
        told = self.custom_patterns
        words = told.split(",") if isinstance(told, str) else list(told)
        chosen = {}
        for word in filter(None, (word.strip() for word in words)):
            name, _, state = word.partition(":")
            if state not in ("", "1", "0", "True", "true", "False", "false"):
                raise UsageError(f"custom_patterns: {word!r}: a name, or a name with :0 or :1")
            chosen[name] = state not in ("0", "False", "false")
        return chosen

    def transforms(self) -> dict[str, Any]:
        """Transforms by checkpoint. UsageError for text that is no dictionary."""
        told = self.custom_transform_applier_settings
        if not isinstance(told, str):
            return dict(told)
        try:
            held = ast.literal_eval(told) if told.strip() else {}
        except (ValueError, SyntaxError) as error:
            raise UsageError(f"custom_transform_applier_settings is no dictionary: {told!r}") from error
        if not isinstance(held, dict):
            raise UsageError(f"custom_transform_applier_settings is no dictionary: {told!r}")
        return held


_OF_SEVERAL_TYPES = (
    *("custom_patterns", "custom_transform_applier_settings", "compilation_progress_logger"),
    "virtual_graph_mode",  # The compiler names the modes.
)


def _fits(value: object, default: object) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, Mapping):
        return isinstance(value, Mapping)
    return isinstance(value, (list, tuple))


def _type_name(default: object) -> str:
    kinds = ((bool, "true or false"), (float, "a number"), (int, "a whole number"), (str, "text"))
    named = next((text for kind, text in kinds if isinstance(default, kind)), None)
    return named or ("a dictionary" if isinstance(default, Mapping) else "a list")


def compiler_option_of(name: str, text: str) -> Any:
    """The value of an option from a word of a command line. UsageError if it is none of its type."""
    default = getattr(CompilerOptions(), name, None)
    if name == "virtual_graph_mode" and text == "auto":
        return "automatic"
    if isinstance(default, bool):
        if text.lower() not in ("1", "0", "true", "false"):
            raise UsageError(f"the compiler option {name} cannot be {text!r}: it is true or false")
        return text.lower() in ("1", "true")
    if isinstance(default, (Mapping, tuple)):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise UsageError(f"the compiler option {name} cannot be {text!r}") from error
    if default is None:
        return text  # `from_dict` names what does not exist.
    try:
        return type(default)(text)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the compiler option {name} cannot be {text!r}") from error
