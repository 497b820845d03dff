"""What a command has in hand: the global options, a client when it needs one, and how it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import JSON_SCHEMA_VERSION, run_while_read
from podrun.core.errors import NotFoundError, PodrunError
from podrun.core.machine_output import print_output
from podrun.core.quick_dataclass import dataclass
from podrun.partition.commands.which_server import SYSTEM_CONFIG, Endpoint, find_server, read_hcl, use_tls
from podrun.partition.state.codec import value_to_json

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


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
    form: str = "table"

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

    def show(self, key: str, value: object, text: Callable[[], str]) -> None:
        """Print ``text()``, or with --format json one object that holds ``value`` under ``key``, and with other formats
        for programs its rows."""
        values = value if isinstance(value, list) else [value]
        print_output(
            "json" if self.json else self.form,
            text=text,
            document={"schema_version": JSON_SCHEMA_VERSION, key: value},
            rows=[one if isinstance(one, dict) else {key: one} for one in values],
        )


def follow(
    client: VipuClient, kinds: tuple[str, ...], once: Callable[[VipuClient], None], name: str = ""
) -> None:
    """Call ``once`` when what is there is known, and again after each change of some kinds (of things of ``name``, if
    that is given), until Ctrl-C or until nobody reads the output."""

    def watch() -> None:
        for change in client.watch(kinds):
            if not change.initial and name in ("", change.name, change.name or name):
                once(client)

    run_while_read(watch)


def partition_names(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    """Names of partitions, for a shell that completes; empty if no server answers at once."""
    try:
        where = find_server(None, None)
        from podrun.partition.client.vipu_client import VipuClient

        with VipuClient(where.host, where.port, timeout=1.0, own=where.own) as client:
            return [info.name for info in client.list_partitions() if info.name.startswith(begun)]
    except PodrunError:
        return []


def open_context(ctx: click.Context, **options: Any) -> CliContext:
    """The CliContext of the global options; answers --server-version."""
    use_tls(options)
    cli = CliContext(
        host=options["api_host"],
        port=options["api_port"],
        config=options["config"],
        timeout=options["timeout"],
        json=options["output"] == "json" or options["showjson"],
        form=options["output"],
        watch=options["watch"],
        account=(options["api_user_id"] or "", options["api_access_key"] or ""),
    )
    ctx.obj = cli
    if options["server_version"]:
        with cli.client() as client:
            version = client.server_version()
        value = value_to_json(version)
        text = f"version: {version.version}\nhost: {version.host}:{version.port}"
        cli.show("server", value, lambda: text)
        ctx.exit(0)
    return cli


@contextmanager
def without_suggestions(name: str) -> Iterator[None]:
    """Drop suggestions for verbs that destroy: a missing name is no reason to suggest another run's partition."""
    try:
        yield
    except NotFoundError as error:
        if not name:
            raise
        raise NotFoundError(
            error.message,
            hint=f"If a run or a server made {name}, it went with it, and there is nothing to do. vipu list partitions "
            "shows which there are and in what state.",
        ) from error
