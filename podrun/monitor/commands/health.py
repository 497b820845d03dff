"""``podrun health``: what is broken, since when, who is hit, what to type; once, or watched and told to a webhook."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, JSON_SCHEMA_VERSION, FiniteRange, run_while_read
from podrun.core.errors import NotFoundError, PodrunError, ServiceError, UsageError
from podrun.core.machine_output import format_option, is_for_people, machine_lines, print_output
from podrun.core.terminal import show_error
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.monitor.node_health import NodeVerdict
    from podrun.monitor.pod_health import HealthProblem, PodHealth

CANNOT_TELL = 3
"""Exit code if no service answers."""
SCONTROL_S = 30.0


@click.command(
    "podrun health",
    context_settings=HELP_OPTIONS,
    epilog="Exit code: 0 nothing is broken, 1 something is (with --strict: or needs attention), 2 wrong options, "
    "3 no service answers.",
)
@format_option
@click.option("--strict", is_flag=True, help="Fail for what needs attention, too.")
@click.option("--watch", is_flag=True, help="Say what begins and ends, until Ctrl-C.")
@click.option("--webhook", metavar="URL", help="With --watch: POST each change there as JSON.")
@click.option(
    "--interval",
    type=FiniteRange(0.1, 3600),
    default=1.0,
    metavar="S",
    help="With --watch: between looks [1].",
)
@click.option(
    "--slurm-node", metavar="NODE", help="Drain or resume this node of Slurm as the POD's health is."
)
@click.option("--dry-run", is_flag=True, help="With --slurm-node: print the commands alone.")
@server_options
def health_verb(form: str, strict: bool, **options: Any) -> int:
    """Say what is broken in a POD: since when, who is hit, and what to type."""
    if options["webhook"] and not options["watch"]:
        raise UsageError("--webhook tells changes, which --watch looks for", hint="Add --watch.")

    told: set[str] = set()

    def examine() -> PodHealth:
        from podrun.monitor.devices import connect_monitor, on_stderr
        from podrun.monitor.pod_health import examine_pod

        def say(line: str) -> None:  # Once, however often a watch looks.
            if line not in told:
                told.add(line)
                on_stderr(line)

        with connect_monitor(options["api_host"], options["api_port"], say=say) as client:
            return examine_pod(client, time.time())

    if options["slurm_node"]:
        return _slurm_node(examine, options["slurm_node"], options["dry_run"])
    if options["watch"]:
        # With a webhook it goes on without a reader: somebody is told.
        def watch() -> None:
            _watch(examine, options["interval"], options["webhook"], form)

        watch() if options["webhook"] else run_while_read(watch)
        return 0
    return _once(examine, form, strict)


def _once(examine: Callable[[], PodHealth], form: str, strict: bool) -> int:
    from podrun.monitor.pod_health import as_text

    try:
        health = examine()
    except PodrunError as error:
        if not is_for_people(form):
            told = {"type": type(error).__name__, "message": error.message, "hint": error.hint or None}
            document = {"schema_version": JSON_SCHEMA_VERSION, "error": told}
            click.echo("\n".join(machine_lines(form, document, [])))
        show_error("podrun health", error, sys.stderr)
        return CANNOT_TELL
    plain = health.plain()
    print_output(
        form,
        text=lambda: "\n".join(as_text(health, time.time())),
        document={"schema_version": JSON_SCHEMA_VERSION, "health": plain},
        rows=plain["problems"],
    )
    return int(not health.healthy or (strict and bool(health.problems)))


def _watch(examine: Callable[[], PodHealth], interval: float, webhook: str | None, form: str) -> None:
    """Print, and send, what begins and ends; a service that is away is a problem too."""
    from podrun.core.machine_output import json_line
    from podrun.monitor.webhooks import WebhookSender, problem_events

    sender = None if webhook is None else WebhookSender(webhook, lambda line: click.echo(line, err=True))
    before: tuple[HealthProblem, ...] = ()
    server = ""
    try:
        while True:
            begin = time.monotonic()
            try:
                health = examine()
                problems, server = health.problems, health.server
            except PodrunError as error:
                problems = (*(one for one in before if one.what != NO_SERVICE), _no_service(error))
            for event in problem_events(before, problems, server, time.time()):
                line = f"{event['event']:<6} {event['text']}"
                click.echo(line if is_for_people(form) else json_line(event))
                if sender is not None:
                    sender.send(event)
            before = problems
            time.sleep(max(0.0, interval - (time.monotonic() - begin)))
    except KeyboardInterrupt:
        return
    finally:
        if sender is not None:
            sender.close()


NO_SERVICE = "the partition service does not answer"


def _no_service(error: PodrunError) -> HealthProblem:
    from podrun.monitor.pod_health import HealthProblem, Severity

    return HealthProblem(
        Severity.BROKEN, NO_SERVICE, "", "", (), None, (), error.hint or "vipu --server-version"
    )


def _slurm_node(examine: Callable[[], PodHealth], node: str, dry_run: bool) -> int:
    """Carry out what a node needs; 1 if it is, or is to be, drained."""
    from podrun.monitor import node_health

    try:
        verdict = node_health.verdict_of(examine().problems)
    except PodrunError as error:
        verdict = node_health.unreachable_verdict(error.message)
    state, reason = ("", "") if dry_run else _node_of_slurm(node)
    for words in node_health.slurm_commands(verdict, node, state, reason):
        if dry_run:
            import shlex

            click.echo(shlex.join(words))
        else:
            _scontrol(words)
    click.echo(_said(verdict, node))
    return int(verdict.drain)


def _said(verdict: NodeVerdict, node: str) -> str:
    return f"{node}: drain ({verdict.reason})" if verdict.drain else f"{node}: well"


def _node_of_slurm(node: str) -> tuple[str, str]:
    """The node's state and reason, as Slurm shows them. Raises PodrunError."""
    shown = _scontrol(["scontrol", "show", "node", node, "--oneliner"])
    fields = dict(part.partition("=")[::2] for part in shown.split(" ") if "=" in part)
    return fields.get("State", ""), shown.partition(" Reason=")[2]


def _scontrol(words: list[str]) -> str:
    if shutil.which(words[0]) is None:
        raise NotFoundError(
            "scontrol is not installed here", hint="Run it on a node of Slurm, or add --dry-run."
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SCONTROL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(
            f"scontrol does not answer within {SCONTROL_S:.0f} s", hint="scontrol ping"
        ) from error
    if done.returncode:
        raise ServiceError(
            f"scontrol refuses: {done.stderr.strip() or done.stdout.strip()}", hint=" ".join(words)
        )
    return done.stdout.strip()
