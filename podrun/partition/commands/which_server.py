"""The server that a command talks to: from options, environment, configuration file, or discovery."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrun.core.access import OWN_SERVER
from podrun.core.documents import read_text
from podrun.core.environment import environment
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass

SYSTEM_CONFIG = Path("/etc/vipu/vipu-cli.hcl")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is expected; ``source`` says why, for messages."""

    host: str
    port: int
    source: str
    own: bool = False
    """The user has not named the server, so it has to prove that it is this user's."""
    discovered: bool = False
    """The server runs on this host, and nobody has named it."""


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
    if host == "":
        raise UsageError("--api-host is empty", hint="As in: --api-host 127.0.0.1")
    if host is not None:
        return Endpoint(host, port or 8090, "the command line")
    for prefix in ("VIPU_CLI_API", "IPUOF_VIPU_API"):
        if env.get(f"{prefix}_HOST"):
            name = f"{prefix}_PORT"
            server_port = port or port_in(env.get(name) or "8090", name, f"As in: export {name}=8090")
            own = prefix.startswith("IPUOF") and env.get(OWN_SERVER) == "1"
            return Endpoint(env[f"{prefix}_HOST"], server_port, f"{prefix}_HOST", own)
    settings = read_hcl(config) if config else read_hcl(SYSTEM_CONFIG) if SYSTEM_CONFIG.is_file() else {}
    if "api-host" in settings:
        name = f"api-port in {config or SYSTEM_CONFIG}"
        number = port or port_in(settings.get("api-port", "8090"), name, 'As in: api-port="8090"')
        return Endpoint(settings["api-host"], number, "the configuration file")
    if port is None:
        from podrun.partition.host.discovery import Registry

        entry = Registry().find(partition=partition)
        if entry is not None:
            return Endpoint(entry.host, entry.port, f"a running {entry.kind}", own=True, discovered=True)
    return Endpoint("127.0.0.1", port or 8090, "the default", own=True)


def port_in(text: str, name: str, hint: str) -> int:
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


def use_tls(options: Mapping[str, Any]) -> None:
    """Use the files that the options name, in this process and its children. Raises UsageError or ConfigError."""
    files = [options[f"tls_{name}"] for name in ("cert", "key", "ca")]
    if any(files):
        from podrun.core import tls

        tls.use(*files)
