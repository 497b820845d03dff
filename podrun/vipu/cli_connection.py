"""Which server a command talks to: options, environment, configuration file, discovery; and its connection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.access import OWN_SERVER
from podrun.core.documents import read_text
from podrun.core.environment import environment
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.vipu.cli_common import json_text

if TYPE_CHECKING:
    from podrun.vipu.client import VipuClient

SYSTEM_CONFIG = Path("/etc/vipu/vipu-cli.hcl")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is expected; ``source`` says why, for messages."""

    host: str
    port: int
    source: str
    own: bool = False
    """Nobody has named it: it has to prove to be this user's."""


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
        from podrun.vipu.discovery import Registry

        entry = Registry().find(partition=partition)
        if entry is not None:
            return Endpoint(entry.host, entry.port, f"a running {entry.kind}", own=True)
    return Endpoint("127.0.0.1", port or 8090, "the default", own=True)


def _port(text: str, name: str, hint: str) -> int:
    """A port from the text of ``name``. Raises UsageError if it is none."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise UsageError(f"{name} is {text!r}, not a port number", hint=hint)
    return int(text)


def read_hcl(path: Path) -> dict[str, str]:
    """Settings of a vipu-cli.hcl file: lines ``name="value"``. Raises ConfigError naming file and line."""
    settings = {}
    try:
        lines = read_text(path, hint="Name another: --config FILE").splitlines()
    except NotFoundError as error:
        raise ConfigError(f"{path} cannot be read: {error.message}", hint=error.hint) from error
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
class CliContext:
    """The global options of `vipu` and `vipu-admin`; makes the client for the command that needs it."""

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
        from podrun.vipu.client import VipuClient

        where = self.endpoint()
        return VipuClient(where.host, where.port, self.timeout, own=where.own)

    def show(self, key: str, value: Any, text: Callable[[], str]) -> None:
        """Print ``text()``, or with --format json one object that holds ``value`` under ``key``."""
        if self.json:
            click.echo(json_text(key, value))
        else:
            click.echo(text())


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--api-host and --api-port, as a decorator: the parameters ``api_host`` and ``api_port``."""
    options = [
        click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one]."),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def global_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The global options, as a decorator of the root command; it stores a CliContext in the context."""
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


def open_context(ctx: click.Context, **options: Any) -> CliContext:
    """The CliContext of the global options; answers --server-version."""
    cli = CliContext(
        host=options["api_host"],
        port=options["api_port"],
        config=options["config"],
        timeout=options["timeout"],
        json=options["output"] == "json" or options["showjson"],
    )
    ctx.obj = cli
    if options["server_version"]:
        with cli.client() as client:
            version = client.server_version()
        value = {"version": version.version, "host": version.host, "port": version.port, "pid": version.pid}
        text = f"version: {version.version}\nhost: {version.host}:{version.port}"
        cli.show("server", value, lambda: text)
        ctx.exit(0)
    return cli
