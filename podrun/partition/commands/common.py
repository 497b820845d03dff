"""Commands of `vipu`, `vipu-admin`, `vipu-server` and the monitor tools: groups with suggestions, errors, JSON, and
which server they talk to (options, environment, configuration file, discovery).

Nothing here imports gRPC, Ray or anything else that is slow: `--help` answers at once.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import click

from podrun.core.access import OWN_SERVER
from podrun.core.documents import read_text
from podrun.core.environment import environment
from podrun.core.errors import ConfigError, NotFoundError, PodrunError, UnsupportedError, UsageError
from podrun.core.terminal import error_lines, show_error
from podrun.partition.state.codec import to_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient

JSON_SCHEMA_VERSION = 1
"""Version of what --format json prints."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Settings of every command: -h means --help."""


@runtime_checkable
class PrintsJson(Protocol):
    """A command's context that knows whether --format json was given."""

    json: bool


class SuggestingGroup(click.Group):
    """A group that answers an unknown command with the nearest one, and accepts other names for commands.

    ``refused``: commands of the real tool that podrun does not have, with what to do instead.
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
            if ctx.parent is None and isinstance(ctx.obj, PrintsJson) and ctx.obj.json:
                plain = {"type": type(error).__name__, "message": error.message, "hint": error.hint or None}
                click.echo(json_text("error", plain))
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.parent is None:
            args = self._globals_first(ctx, args)
        return super().parse_args(ctx, args)

    def _globals_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the root's options before the command: users may put them anywhere, as in the real tools. A command's
        own option of the same name stays where it is."""
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
            raise UnsupportedError(f"podrun does not have {ctx.command_path} {name}", hint=hint)
        unknown = args and not name.startswith("-") and self.get_command(ctx, name) is None
        if unknown and not ctx.resilient_parsing:  # A shell that asks for completions wants no error.
            known = self.list_commands(ctx)
            others = [other for other, real in self.other_names.items() if real in known]
            close = difflib.get_close_matches(name, [*known, *others], n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Commands: {', '.join(known)}."
            raise click.UsageError(f"no such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


def run(command: click.Command, args: list[str] | None = None) -> int:
    """Run a command; prints errors to stderr and returns the exit code (0, 1, 2, or 130 after Ctrl-C)."""
    name = command.name or ""
    try:
        result = command.main(args=args, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else name
        message = error.format_message()
        sys.stderr.write(error_lines(name, message[:1].lower() + message[1:], f"{where} --help"))
        return error.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except PodrunError as error:
        show_error(name, error)
        return error.exit_code
    return int(result) if isinstance(result, int) else 0


# --- output -----------------------------------------------------------------------------------------------------


def json_text(key: str, value: Any) -> str:
    """One JSON object with the schema version and ``value`` under ``key``."""
    return json.dumps({"schema_version": JSON_SCHEMA_VERSION, key: value}, indent=2)


SYSTEM_CONFIG = Path("/etc/vipu/vipu-cli.hcl")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is expected; ``source`` says why, for messages."""

    host: str
    port: int
    source: str
    own: bool = False
    """The user has not named the server, so it has to prove that it is this user's."""


def find_server(
    host: str | None,
    port: int | None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    partition: str | None = None,
) -> Endpoint:
    """The server to use: from options, else environment, else configuration file, else a running one, else the default.

    Environment: VIPU_CLI_API_HOST and _PORT, then IPUOF_VIPU_API_HOST and _PORT, which `podrun` gives its instances.
    """
    env = environment(environ)
    if host is not None:
        return Endpoint(host, port or 8090, "the command line")
    for prefix in ("VIPU_CLI_API", "IPUOF_VIPU_API"):
        if env.get(f"{prefix}_HOST"):
            name = f"{prefix}_PORT"
            found = port or _port(env.get(name) or "8090", name, f"As in: export {name}=8090")
            own = prefix.startswith("IPUOF") and env.get(OWN_SERVER) == "1"
            return Endpoint(env[f"{prefix}_HOST"], found, f"{prefix}_HOST", own)
    settings = read_hcl(config) if config else read_hcl(SYSTEM_CONFIG) if SYSTEM_CONFIG.is_file() else {}
    if "api-host" in settings:
        name = f"api-port in {config or SYSTEM_CONFIG}"
        number = port or _port(settings.get("api-port", "8090"), name, 'As in: api-port="8090"')
        return Endpoint(settings["api-host"], number, "the configuration file")
    if port is None:
        from podrun.partition.host.discovery import Registry

        entry = Registry().find(partition=partition)
        if entry is not None:
            return Endpoint(entry.host, entry.port, f"a running {entry.kind}", own=True)
    return Endpoint("127.0.0.1", port or 8090, "the default", own=True)


def _port(text: str, name: str, hint: str) -> int:
    """A port from the text of ``name``. Raises UsageError if it is not a port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise UsageError(f"{name} is {text!r}, not a port number", hint=hint)
    return int(text)


def read_hcl(path: Path) -> dict[str, str]:
    """Settings of a vipu-cli.hcl file: lines ``name="value"``. Raises ConfigError naming file and line."""
    settings = {}
    try:
        lines = read_text(path, hint="Name another: --config FILE").splitlines()
    except NotFoundError as error:
        raise ConfigError(error.message, hint=error.hint) from error
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r'([a-z0-9-]+)\s*=\s*"?([^"]*)"?', text)
        if match is None:
            raise ConfigError(f"{path}:{number}: {text!r} is no setting", hint='As in: api-host="127.0.0.1"')
        settings[match[1]] = match[2]
    return settings


def write_account(
    path: Path, host: str, port: int, account: tuple[str, str], hint: str = "Make room there, and try again."
) -> None:
    """Write a vipu-cli.hcl file (mode 0600) with a server, a user and its access key. Raises UsageError with that
    hint."""
    lines = (
        ("api-host", host),
        ("api-port", str(port)),
        ("api-user-id", account[0]),
        ("api-access-key", account[1]),
    )
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            os.fchmod(file, 0o600)
            text.writelines(f'{name}="{value}"\n' for name, value in lines)
    except OSError as error:
        raise UsageError(
            f"the access key of {account[0]} cannot be written to {path}: {error.strerror}",
            hint=hint,
        ) from error


@dataclass(slots=True)
class CliContext:
    """The global options of `vipu` and `vipu-admin`; makes the client for the command that needs it."""

    host: str | None
    port: int | None
    config: Path | None
    timeout: float
    json: bool
    account: tuple[str, str] = ("", "")
    watch: bool = False

    def repeat(self, kinds: tuple[str, ...], once: Callable[[VipuClient], None], name: str = "") -> None:
        """Call ``once`` with a client; with --watch again after each change of some kinds, until Ctrl-C. ``name``: only
        after changes of things of that name."""
        with self.client() as client:
            if self.watch:
                follow(client, kinds, once, name)
            else:
                once(client)

    def endpoint(self) -> Endpoint:
        """Where the server is expected."""
        return find_server(self.host, self.port, config=self.config)

    def client(self) -> VipuClient:
        """A client of that server."""
        from podrun.partition.client.vipu_client import VipuClient

        where = self.endpoint()
        return VipuClient(where.host, where.port, self.timeout, own=where.own, account=self.user_and_key())

    def user_and_key(self) -> tuple[str, str]:
        """User and access key from the options, else from the configuration file; empty if neither names them."""
        if any(self.account):
            return self.account
        path = self.config or (SYSTEM_CONFIG if SYSTEM_CONFIG.is_file() else None)
        settings = read_hcl(path) if path else {}
        return settings.get("api-user-id", ""), settings.get("api-access-key", "")

    def show(self, key: str, value: Any, text: Callable[[], str]) -> None:
        """Print ``text()``, or with --format json one object that holds ``value`` under ``key``."""
        if self.json:
            click.echo(json_text(key, value))
        else:
            click.echo(text())


def follow(
    client: VipuClient, kinds: tuple[str, ...], once: Callable[[VipuClient], None], name: str = ""
) -> None:
    """Call ``once`` when what is there is known, and again after each change of some kinds (of things of ``name``, if
    that is given), until Ctrl-C."""
    for change in client.watch(kinds):
        if not change.initial and name in ("", change.name, change.name or name):
            once(client)


def partition_names(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Names of partitions, for a shell that completes; empty if no server answers at once."""
    try:
        where = find_server(None, None)
        from podrun.partition.client.vipu_client import VipuClient

        with VipuClient(where.host, where.port, timeout=1.0, own=where.own) as client:
            return [info.name for info in client.list_partitions() if info.name.startswith(begun)]
    except PodrunError:
        return []


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--api-host and --api-port, as a decorator: the parameters ``api_host`` and ``api_port``."""
    options = [
        click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one]."),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--tls-cert, --tls-key and --tls-ca, as a decorator; `use_tls` reads them."""
    for name, what in (
        ("ca", "the authority's certificate"),
        ("key", "its key"),
        ("cert", "this host's certificate"),
    ):
        variable = f"PODRUN_TLS_{name.upper()}"
        command = click.option(
            f"--tls-{name}",
            metavar="FILE",
            envvar=[f"VIPU_CLI_TLS_{name.upper()}", variable],
            help=f"Speak TLS: {what} [{variable}].",
        )(command)
    return command


def use_tls(options: Mapping[str, Any]) -> None:
    """Use the files that the options name, in this process and its children. Raises UsageError or ConfigError."""
    files = [options[f"tls_{name}"] for name in ("cert", "key", "ca")]
    if any(files):
        from podrun.core import tls

        tls.use(*files)


def global_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The global options, as a decorator of the root command; it stores a CliContext in the context."""
    options: list[Callable[..., Any]] = [
        click.option(
            "--api-host", "-H", metavar="HOST", help="Server [VIPU_CLI_API_HOST, else a running one]."
        ),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port [8090]."),
        click.option("--api-user-id", metavar="ID", help="User, if the server has users (--secure)."),
        click.option("--api-access-key", metavar="KEY", help="That user's access key."),
        tls_options,
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
        click.option(
            "--watch", is_flag=True, help="With list and get: print again whenever something changes."
        ),
        click.option("--server-version", is_flag=True, help="Print the server's version and address."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def open_context(ctx: click.Context, **options: Any) -> CliContext:
    """The CliContext of the global options; answers --server-version."""
    use_tls(options)
    cli = CliContext(
        host=options["api_host"],
        port=options["api_port"],
        config=options["config"],
        timeout=options["timeout"],
        json=options["output"] == "json" or options["showjson"],
        watch=options["watch"],
        account=(options["api_user_id"] or "", options["api_access_key"] or ""),
    )
    ctx.obj = cli
    if options["server_version"]:
        with cli.client() as client:
            version = client.server_version()
        value = to_json(version)
        text = f"version: {version.version}\nhost: {version.host}:{version.port}"
        cli.show("server", value, lambda: text)
        ctx.exit(0)
    return cli
