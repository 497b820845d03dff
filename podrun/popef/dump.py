"""``popef_dump FILE``: what a PopEF file holds, as text for people or as JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.popef.metadata import PopefAnchor, PopefMetadata, PopefTensor
from podrun.popef.reader import AnyProgramReader, PopefReader


def file_contents(reader: PopefReader) -> dict[str, Any]:
    """Everything but the bytes of tensors and executables, as plain JSON values."""
    return {
        "schema": "podrun-popef-1",
        "metadata": [item.to_json() for item in reader.metadata()],
        "executables": [{"name": item.name, "bytes": item.section.size} for item in reader.executables()],
        "tensors": [{"name": item.name, **item.info.to_json()} for item in reader.tensors()],
        "feeds": [{"name": item.name, **item.info.to_json()} for item in reader.feeds()],
        "opaqueBlobs": [
            {"name": item.name, "executable": item.executable, "bytes": item.section.size}
            for item in reader.opaqueBlobs()
        ],
    }


def _form(info: PopefTensor) -> str:
    return f"{info.dataType.name}{list(info.shape)}"


def _anchor_lines(anchor: PopefAnchor, programs: dict[int, str]) -> str:
    moved = ", ".join(programs[index] for index in anchor.programs)
    item = "per replica" if anchor.isPerReplica else "the same for all replicas"
    form = _form(anchor.tensorInfo)
    return f"    {anchor.type.value:<7}{anchor.name}: {form}, handle {anchor.handle}, {item} ({moved})"


def metadata_text(metadata: PopefMetadata) -> str:
    """The metadata of one executable for people."""
    programs = dict(metadata.programsMap)
    flow = metadata.programFlow
    lines = [f"Metadata of executable {metadata.executable!r}"]
    for label, value in (
        ("replication factor", metadata.replicationFactor),
        ("IPUs", metadata.numIpus),
        ("IPU version", metadata.ipuVersion),
        ("inference", metadata.isInference),
        ("device iterations", metadata.deviceIterations),
        ("processes", metadata.numProcesses),
        ("seed handle", metadata.seedHandle or "none"),
        ("compiled by", metadata.hash),
    ):
        lines.append(f"  {label}: {value}")
    for label, options in (("engine", metadata.engineOptions), ("device", metadata.deviceOptions)):
        lines += [f"  {label} option {name}: {value}" for name, value in sorted(options.items())]
    lines.append("  programs:")
    lines += [f"    {index}: {name}" for index, name in sorted(programs.items())]
    for when, indices in (("load", flow.load), ("main", flow.main), ("save", flow.save)):
        lines.append(f"  program flow, {when}: {', '.join(map(str, indices)) or 'none'}")
    lines.append("  anchors:")
    lines += [_anchor_lines(anchor, programs) for anchor in metadata.anchors]
    return "\n".join(lines)


def parts_text(reader: PopefReader) -> str:
    """The other parts of a file for people."""
    lines = [f"Executable {item.name!r}: {item.section.size} bytes" for item in reader.executables()]
    lines += [f"Tensor {item.name!r}: {_form(item.info)}" for item in reader.tensors()]
    lines += [f"Feed {item.name!r}: {_form(item.info)}" for item in reader.feeds()]
    lines += [
        f"Opaque blob {item.name!r} of executable {item.executable!r}: {item.section.size} bytes"
        for item in reader.opaqueBlobs()
    ]
    return "\n".join(lines)


@click.command("popef_dump", context_settings=HELP_OPTIONS, epilog="Example: popef_dump -m executable.popef")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("-m", "--metadata", is_flag=True, help="Show the metadata alone.")
@click.option("--all", "everything", is_flag=True, help="Show all parts, which is what no option does too.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def dump_command(files: tuple[Path, ...], metadata: bool, everything: bool, as_json: bool) -> int:
    """Show what PopEF files hold. A file that is damaged or foreign is refused with the reason."""
    for path in files:
        reader = AnyProgramReader().parseFile(path)
        if as_json:
            shown = file_contents(reader)
            shown = (
                {key: shown[key] for key in ("schema", "metadata")} if metadata and not everything else shown
            )
            click.echo(json.dumps(shown, indent=1, sort_keys=True))
            continue
        texts = [metadata_text(item) for item in reader.metadata()]
        if everything or not metadata:
            texts.append(parts_text(reader))
        click.echo("\n".join(text for text in texts if text))
    return 0
