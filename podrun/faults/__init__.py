"""Faults: what may go wrong on a machine, when, and the error that follows. Pure data and rules.

Fault texts enter from command lines, files, the environment and the network, and become `FaultSpec` values where they
enter (`podrun.core.fault_forms`, `plan_file`); values travel on (`podrun.core.fault_spec`, also in errors and in the
reports of machines). `podrun.core.fault_kinds` and `fault_effects` have what there is, `fault_errors` the errors and
what to do next, `validity` what cannot happen. A machine's `FaultPoint` (`point`) hands the fault that strikes to the
machine, which marks its IPUs or ends. `in_program` has the faults that strike in instances.

A module is imported when one of its names is first asked for: tools that only read values start without the rules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrun.core.fault_effects import EFFECTS, Effect
    from podrun.core.fault_forms import parse_fault, parse_faults
    from podrun.core.fault_kinds import DISTURBANCES
    from podrun.core.fault_spec import OF_INSTANCES, FaultSpec, FaultTarget, Struck
    from podrun.faults.fault_errors import (
        OF_A_LAUNCH,
        cause_of,
        ends_with_launch,
        error_for,
        hint_in_launch,
        recovery_hint,
    )
    from podrun.faults.in_program import PlanOfALaunch, ProgramFaults, program_faults
    from podrun.faults.plan_file import (
        UNSTRUCK_EXIT_CODE,
        ProcessPlan,
        parse_plan,
        plan_in_process,
        plan_schema,
        process_plan,
        read_plan,
        report_unstruck,
        simulated_soc_errors,
    )
    from podrun.faults.point import FaultPoint, Strike
    from podrun.faults.validity import WHOLE_MACHINES, ListPlaces, check_places, partition_links, validate

__all__ = [
    "DISTURBANCES",
    "EFFECTS",
    "OF_A_LAUNCH",
    "OF_INSTANCES",
    "UNSTRUCK_EXIT_CODE",
    "WHOLE_MACHINES",
    "Effect",
    "FaultPoint",
    "FaultSpec",
    "FaultTarget",
    "ListPlaces",
    "PlanOfALaunch",
    "ProcessPlan",
    "ProgramFaults",
    "Strike",
    "Struck",
    "cause_of",
    "check_places",
    "ends_with_launch",
    "error_for",
    "hint_in_launch",
    "parse_fault",
    "parse_faults",
    "parse_plan",
    "partition_links",
    "plan_in_process",
    "plan_schema",
    "process_plan",
    "program_faults",
    "read_plan",
    "recovery_hint",
    "report_unstruck",
    "simulated_soc_errors",
    "validate",
]

_MODULE_BY_NAME = {
    name: module
    for module, names in {
        "core.fault_effects": "EFFECTS Effect",
        "faults.fault_errors": "OF_A_LAUNCH cause_of ends_with_launch error_for hint_in_launch recovery_hint",
        "faults.in_program": "PlanOfALaunch ProgramFaults program_faults",
        "core.fault_kinds": "DISTURBANCES",
        "faults.plan_file": "UNSTRUCK_EXIT_CODE ProcessPlan parse_plan plan_in_process plan_schema process_plan"
        " read_plan report_unstruck simulated_soc_errors",
        "faults.point": "FaultPoint Strike",
        "core.fault_forms": "parse_fault parse_faults",
        "core.fault_spec": "OF_INSTANCES FaultSpec FaultTarget Struck",
        "faults.validity": "WHOLE_MACHINES ListPlaces check_places partition_links validate",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"podrun.{module}"), name)
    return value
