"""What `vipu`, `vipu-admin`, `vipu-server` and the monitor tools share: errors, suggestions, finding the
server.

Nothing here imports gRPC, Ray or anything else that is slow: `--help` answers at once.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.errors import ConfigError, PodrunError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from podrun.partition.client import VipuClient

SYSTEM_CONFIG = Path("/etc/vipu/vipu-cli.hcl")
JSON_SCHEMA_VERSION = 1
"""Version of what --format json prints."""


class SuggestingGroup(click.Group):
    """A group that answers an unknown command with the nearest real one, and knows other names for commands.

    ``refused``: commands of the real tool that are not there, with what to do instead.
    """

    def __init__(
        self,
        *args: Any,
        aliases: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.other_names = dict(aliases or {})
        self.refused = dict(refused or {})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.other_names.get(cmd_name, cmd_name))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PodrunError as error:
            if ctx.parent is None and isinstance(ctx.obj, Session) and ctx.obj.json:
                plain = {"type": type(error).__name__, "message": error.message, "hint": error.hint or None}
                ctx.obj.show("error", plain, str)
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.parent is None:
            args = self._globals_first(ctx, args)
        return super().parse_args(ctx, args)

    def _globals_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words with the root's options before the command: they may stand anywhere, as in the real tools. A
        command's own option of the same name stays where it is.
        """
        known = {
            name: option
            for option in self.params
            if isinstance(option, click.Option)
            for name in option.opts
            if name not in ("-h", "--help", "--version")
        }
        front: list[str] = []
        rest: list[str] = []
        command: click.Command = self
        queue = list(args)
        while queue:
            word = queue.pop(0)
            if word == "--":
                return [*front, *rest, word, *queue]
            if not word.startswith("-"):
                if isinstance(command, click.Group):
                    command = command.get_command(ctx, word) or command
                rest.append(word)
                continue
            name, equals, _ = word.partition("=")
            own = {} if command is self else {o: p for p in command.params for o in p.opts}
            into = front if name in known and name not in own else rest
            option = known.get(name) if into is front else own.get(name)
            into.append(word)
            if isinstance(option, click.Option) and not (equals or option.is_flag) and queue:
                into.append(queue.pop(0))
        return front + rest

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if hint := self.refused.get(self.other_names.get(name, name)):
            raise UnsupportedError(f"{ctx.command_path} {name} is not there in podrun", hint=hint)
        if args and not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            others = [other for other, real in self.other_names.items() if real in known]
            close = difflib.get_close_matches(name, [*known, *others], n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Commands: {', '.join(known)}."
            raise click.UsageError(f"no such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


def run(command: click.Command, args: list[str] | None = None) -> int:
    """Run a command; prints errors to stderr and returns the exit code (0, 1, 2, or 130 after Ctrl-C)."""
    try:
        result = command.main(args=args, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except PodrunError as error:
        show_error(error)
        return error.exit_code
    return int(result) if isinstance(result, int) else 0


def show_error(error: PodrunError) -> None:
    """Print an error and its hint to stderr."""
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is expected, and how we know (for messages)."""

    host: str
    port: int
    source: str


def find_server(
    host: str | None,
    port: int | None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    partition: str | None = None,
) -> Endpoint:
    """The server to talk to: option, else environment, else configuration file, else a running one, else the
    default.

    Environment: IPUOF_VIPU_API_HOST and _PORT (what `podrun` gives its instances), VIPU_CLI_API_HOST and
    _PORT.
    """
    env = os.environ if environ is None else environ
    if host is not None:
        return Endpoint(host, port or 8090, "the command line")
    for prefix in ("VIPU_CLI_API", "IPUOF_VIPU_API"):
        if env.get(f"{prefix}_HOST"):
            text = env.get(f"{prefix}_PORT", "")
            if text and not text.isdigit():
                raise UsageError(
                    f"{prefix}_PORT is {text!r}, not a port number", hint=f"As in: export {prefix}_PORT=8090"
                )
            return Endpoint(env[f"{prefix}_HOST"], port or int(text or 8090), f"{prefix}_HOST")
    settings = read_hcl(config) if config else read_hcl(SYSTEM_CONFIG) if SYSTEM_CONFIG.is_file() else {}
    if "api-host" in settings:
        return Endpoint(
            settings["api-host"], port or int(settings.get("api-port", 8090)), "the configuration file"
        )
    if port is None:
        from podrun.partition.discovery import Registry

        found = Registry().find(partition=partition)
        if found is not None:
            return Endpoint(found.host, found.port, f"a running {found.kind}")
    return Endpoint("127.0.0.1", port or 8090, "the default")


def read_hcl(path: Path) -> dict[str, str]:
    """Settings of a vipu-cli.hcl file: lines ``name="value"``. Raises ConfigError naming file and line."""
    settings = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="Name another: --config FILE"
        ) from error
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r'([a-z0-9-]+)\s*=\s*"?([^"]*)"?', text)
        if match is None:
            raise ConfigError(f"{path}:{number}: {text!r} is no setting", hint='As in: api-host="127.0.0.1"')
        settings[match[1]] = match[2]
    return settings


@dataclass(slots=True)
class Session:
    """What the global options of `vipu` and `vipu-admin` say; makes the client when a command needs it."""

    host: str | None
    port: int | None
    config: Path | None
    timeout: float
    json: bool

    def endpoint(self) -> Endpoint:
        """Where the server is expected."""
        return find_server(self.host, self.port, config=self.config)

    def client(self) -> VipuClient:
        """A client of that server."""
        from podrun.partition.client import VipuClient

        where = self.endpoint()
        return VipuClient(where.host, where.port, self.timeout)

    def show(self, key: str, value: Any, text: Callable[[], str]) -> None:
        """Print ``text()``, or with --format json one object that holds ``value`` under ``key``."""
        if self.json:
            click.echo(json.dumps({"schema_version": JSON_SCHEMA_VERSION, key: value}, indent=2))
        else:
            click.echo(text())


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The global options, as a decorator of the root command; it stores a Session in the context."""
    options = [
        click.option(
            "--api-host", "-H", metavar="HOST", help="Server [VIPU_CLI_API_HOST, else a running one]."
        ),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port [8090]."),
        click.option("--api-user-id", metavar="ID", help="Accepted; the server does not authenticate."),
        click.option("--api-access-key", metavar="KEY", help="Accepted; the server does not authenticate."),
        click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="vipu-cli.hcl file."),
        click.option(
            "--timeout",
            type=click.FloatRange(0.1),
            default=120.0,
            metavar="SECONDS",
            help="How long a request may take [120].",
        ),
        click.option(
            "--format",
            "output",
            type=click.Choice(["text", "json"]),
            default="text",
            help="What to print [text].",
        ),
        click.option("--showjson", is_flag=True, hidden=True),
        click.option("--server-version", is_flag=True, help="Print the server's version and address."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def open_session(ctx: click.Context, **options: Any) -> Session:
    """The Session of the global options; answers --server-version."""
    session = Session(
        host=options["api_host"],
        port=options["api_port"],
        config=options["config"],
        timeout=options["timeout"],
        json=options["output"] == "json" or options["showjson"],
    )
    ctx.obj = session
    if options["server_version"]:
        with session.client() as client:
            version = client.server_version()
        value = {"version": version.version, "host": version.host, "port": version.port, "pid": version.pid}
        text = f"version: {version.version}\nhost: {version.host}:{version.port}"
        session.show("server", value, lambda: text)
        ctx.exit(0)
    return session
