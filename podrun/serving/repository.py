"""A repository of models before it is served: which folders there are, configurations that are missing, and the
environment of the processes that serve it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from podrun.core.environment import PODRUN_FAULTS
from podrun.core.errors import ConfigError
from podrun.faults import parse_faults
from podrun.popef.metadata import ElementType, PopefAnchor
from podrun.popef.reader import PopefReader
from podrun.serving.fused_models import INDEX, fused_graphs, graph_of
from podrun.serving.model_folder import MODEL_FILE, versions_of
from podrun.serving.request_incidents import VARIABLE as INCIDENTS

_TIME_ENTRY = '{ name: "ipu_time_us", data_type: TYPE_FP32, dims: [ %s ] }'


def check_repository(repository: Path) -> list[Path]:
    """The folders of models. ConfigError for a repository that is none, or that cannot be read."""
    if not repository.is_dir():
        raise ConfigError(f"there is no model repository {repository}", hint=f"mkdir -p {repository}/MODEL/1")
    try:
        return sorted(
            path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except OSError as error:
        raise ConfigError(f"{repository} cannot be read: {error.strerror or error}") from error


def write_missing_config(model: Path) -> Path | None:
    """Write the ``config.pbtxt`` of a model that has none, from its newest compiled file; the path, or None."""
    target = model / "config.pbtxt"
    files = [path / MODEL_FILE for path in versions_of(model).values() if (path / MODEL_FILE).is_file()]
    if target.exists() or not files:
        return None
    metadata = PopefReader().parseFile(files[-1]).metadata()[0]
    fused = bool(fused_graphs(anchor.name for anchor in metadata.inputs()))
    inputs = [anchor for anchor in metadata.inputs() if not fused or anchor.name != INDEX]
    rows = {graph_of(a.name) if fused else None: (a.tensorInfo.shape or (0,))[0] for a in reversed(inputs)}
    # Without the batch as the first dimension of all outputs, nothing says what belongs to a request's rows.
    batched = all(
        list(anchor.tensorInfo.shape[:1]) == [rows.get(graph_of(anchor.name) if fused else None, 0)]
        for anchor in metadata.outputs()
    )
    most = max(rows.values(), default=0) * metadata.replicationFactor
    lines = ['backend: "poplar"', f"max_batch_size: {most if batched else 0}"]
    for key, anchors in (("input", inputs), ("output", metadata.outputs())):
        optional = fused and key == "input"
        entries = [_entry(anchor, batched=batched, optional=optional) for anchor in anchors]
        if key == "output":
            entries.append(_TIME_ENTRY % ("3" if batched else "-1, 3"))
        lines.append(f"{key} [ {', '.join(entries)} ]")
    lines.append("instance_group [ { kind: KIND_CPU, count: 1 } ]")
    lines += ["dynamic_batching { }", ""] if batched else [""]
    try:
        target.write_text("\n".join(lines))
    except OSError as error:
        target.unlink(missing_ok=True)
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}",
            hint="Make room, or write the configuration yourself: podrun help serving shows one.",
        ) from error
    return target


def _entry(anchor: PopefAnchor, *, batched: bool, optional: bool = False) -> str:
    names = {
        ElementType.BOOL: "BOOL",
        ElementType.F16: "FP16",
        ElementType.F32: "FP32",
        ElementType.U8: "UINT8",
    }
    kind = names.get(anchor.tensorInfo.dataType, anchor.tensorInfo.dataType.value.upper())
    shape = anchor.tensorInfo.shape
    dims = ", ".join(map(str, (shape[1:] if batched else shape) or (1,)))
    told = ", optional: true" if optional else ""
    return f'{{ name: "{anchor.name}", data_type: TYPE_{kind}, dims: [ {dims} ]{told} }}'


def serving_environment(
    environ: Mapping[str, str], faults: Sequence[str] = (), incidents: Path | None = None
) -> dict[str, str]:
    """The environment of processes that serve, with faults that are planned and a file for incidents. UsageError for a
    text that is no fault, ConfigError for a file that cannot be written.
    """
    variables = dict(environ)
    if faults:
        specs = parse_faults(" ".join(faults))
        variables[PODRUN_FAULTS] = " ".join(spec.text for spec in specs)
    if incidents is not None:
        try:
            incidents.touch(mode=0o600)
        except OSError as error:
            raise ConfigError(f"{incidents} cannot be written: {error.strerror or error}") from error
        variables[INCIDENTS] = str(incidents.resolve())
    return variables
