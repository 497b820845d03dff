"""What a drill is: a YAML file, checked against ``scenario.schema.json``, with places that are drawn by a seed.

``choose`` names values to draw; ``{name}`` in programs, faults, answers, solutions and texts stands for the one that
was drawn. An answer has the form TARGET:PLACE:KIND, the words of `podrun faults kinds` without the moment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from podrun.core.documents import Document, load_schema, read_document
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec, parse_fault

ENDING = ".drill.yaml"
JOBS = ("train", "hold")
"""Programs of the package that jobs may run."""


@dataclass(frozen=True, slots=True)
class DrillJob:
    """A launch on a partition. ``program``: one of `JOBS`, or a file. ``options``: of podrun."""

    partition: str
    size: int
    program: str
    replicas: int
    instances: int
    options: tuple[str, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrillScenario:
    """A drill whose places are drawn.

    ``faults``: partition and fault of each, planned when all jobs work. ``job_faults``: those that strike in instances.
    ``requests``: names and sizes of partitions that are asked for then, and wait. ``service_delay_s``: how late the
    partition service answers. ``answers``: right ones, the first of which the explanation names. ``repair``: the POD
    must also be healthy again. ``allowed``: changes that do no damage, as the control log names them. ``par_s`` and
    ``limit_s``: time for full points, and for any.
    """

    name: str
    title: str
    story: str
    pod: str
    jobs: tuple[DrillJob, ...]
    faults: tuple[tuple[str, FaultSpec], ...]
    job_faults: tuple[FaultSpec, ...]
    requests: tuple[tuple[str, int], ...]
    service_delay_s: float
    answers: tuple[str, ...]
    repair: bool
    allowed: tuple[str, ...]
    par_s: float
    limit_s: float
    hints: tuple[str, ...]
    solution: tuple[str, ...]
    explanation: str


def built_in_drills() -> dict[str, str]:
    """Names of the package's drills, with their titles."""
    folder = resources.files("podrun.drill") / "scenarios"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(ENDING))
    return {
        name.removesuffix(ENDING): str(read_document(Path(str(folder / name))).value["title"])
        for name in names
    }


def load_scenario(name: str, seed: int) -> DrillScenario:
    """A drill of the package by name, or of a file. Raises NotFoundError, ConfigError with file and line."""
    path = Path(name)
    if not path.is_file():
        path = Path(str(resources.files("podrun.drill") / "scenarios" / f"{name}{ENDING}"))
    if not path.is_file():
        raise NotFoundError(
            f"there is no drill {name!r}", hint=f"Drills: {', '.join(built_in_drills())}. Or name a file."
        )
    document = read_document(path, hint="podrun help drills")
    document.check(load_schema("podrun.drill", "scenario.schema.json"), hint="podrun help drills")
    return _drawn(path.name.removesuffix(ENDING).removesuffix(".yaml"), document, random.Random(seed))


def _drawn(name: str, document: Document, dice: random.Random) -> DrillScenario:
    value: Mapping[str, Any] = document.value
    drawn: dict[str, str] = {}
    for key, options in value.get("choose", {}).items():
        choice = dice.choice(options)  # A mapping draws several values together.
        drawn |= {k: str(v) for k, v in choice.items()} if isinstance(choice, dict) else {key: str(choice)}

    def text(template: object) -> str:
        try:
            return str(template).format_map(drawn)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{document.where}: {template!r} names {error}, which choose: does not have",
                hint="Write braces that stand for themselves twice: {{ }}",
            ) from error

    def texts(key: str) -> tuple[str, ...]:
        return tuple(text(one) for one in value.get(key, ()))

    def fault(template: object) -> FaultSpec:
        try:
            return parse_fault(text(template))
        except UsageError as error:
            raise ConfigError(f"{document.where}: {error.message}", hint=error.hint) from error

    partitions = {job["partition"] for job in value["jobs"]}
    for place, one in enumerate(value.get("faults", ())):
        if one["partition"] not in partitions:
            raise document.error(("faults", place, "partition"), f"no job has partition {one['partition']!r}")
    return DrillScenario(
        name=name,
        title=text(value["title"]),
        story=text(value["story"]).strip(),
        pod=value.get("pod", "pod16"),
        jobs=tuple(_job(job, document.where, text(job.get("program", "train"))) for job in value["jobs"]),
        faults=tuple((one["partition"], fault(one["fault"])) for one in value.get("faults", ())),
        job_faults=tuple(map(fault, value.get("job-faults", ()))),
        requests=tuple((one["name"], one["size"]) for one in value.get("requests", ())),
        service_delay_s=float(value.get("service-delay-seconds", 0)),
        answers=tuple(normal_answer(one) for one in texts("answers")),
        repair=bool(value.get("repair", False)),
        allowed=tuple(value.get("allowed", ())),
        par_s=float(value.get("par-seconds", 120)),
        limit_s=float(value.get("limit-seconds", 900)),
        hints=texts("hints"),
        solution=texts("solution"),
        explanation=text(value["explanation"]).strip(),
    )


def _job(value: Mapping[str, Any], where: str, program: str) -> DrillJob:
    if program not in JOBS and not (Path(where).parent / program).is_file():
        raise ConfigError(
            f"{where}: there is no program {program!r}", hint=f"Programs: {', '.join(JOBS)}, or a file."
        )
    return DrillJob(
        partition=value["partition"],
        size=value["size"],
        program=program if program in JOBS else str((Path(where).parent / program).resolve()),
        replicas=value.get("replicas", value["size"]),
        instances=value.get("instances", 1),
        options=tuple(map(str, value.get("options", ()))),
        arguments=tuple(map(str, value.get("arguments", ()))),
    )


def normal_answer(answer: str) -> str:
    """An answer in one spelling: lower case, links with their smaller IPU first."""
    parts = [part.strip().lower() for part in answer.split(":")]
    if len(parts) == 3 and parts[0].endswith("link") and "-" in parts[1]:
        ends = parts[1].split("-")
        if all(end.isdecimal() for end in ends):
            parts[1] = "-".join(sorted(ends, key=int))
    return ":".join(parts)


def scenario_schema() -> str:
    """The JSON schema of a drill's file."""
    return json.dumps(load_schema("podrun.drill", "scenario.schema.json"), indent=2)


def check_answer_form(answer: str) -> Sequence[str]:
    """The three parts of an answer. Raises ConfigError if it has others."""
    parts = normal_answer(answer).split(":")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(
            f"an answer is TARGET:PLACE:KIND, not {answer!r}",
            hint="As in: machine:1:slow, link:2-3:down, ipu:5:corrupt, disk:0:full, partition:a:idle",
        )
    return parts
