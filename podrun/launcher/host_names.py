"""Names of hosts: ``--host`` with ranges, host files, and which of them is this host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from podrun.core.documents import read_text
from podrun.core.errors import ConfigError, NotFoundError, UsageError

LOCAL_HOST = "localhost"
MAX_HOSTS = 1 << 14
_ONE_A_LINE = "Name a file with one host a line: host0, or 10.0.0.1."
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_ITEM = re.compile(r"(?P<head>[^\[\],]+)(?:\[(?P<ranges>[^\[\]]*)\](?P<tail>[^\[\],]*))?")


def parse_hosts(text: str, option: str = "--host") -> tuple[str, ...]:
    """Hosts in the order given. Ranges keep leading zeros: ``n[08-10]`` is n08 to n10. Raises UsageError."""
    hosts: list[str] = []
    position = 0
    while True:
        match = _ITEM.match(text, position)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise _bad(option, text)
        hosts += _expand(match, option, text)
        if len(hosts) > MAX_HOSTS:
            raise UsageError(f"{option} {text} names more than {MAX_HOSTS} hosts", hint="Name fewer.")
        position = match.end() + 1
        if match.end() == len(text):
            break
    return _checked(hosts, f"{option} {text}")


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Hosts of a file, one a line; ``#`` starts a comment. Raises NotFoundError, UsageError."""
    try:
        lines = read_text(path, hint=_ONE_A_LINE).splitlines()
    except NotFoundError:
        raise NotFoundError(f"there is no host file {path}", hint=_ONE_A_LINE) from None
    except ConfigError as error:
        raise UsageError(f"the host file {error.message}", hint=_ONE_A_LINE) from error
    hosts = [(number, name) for number, line in enumerate(lines, 1) if (name := line.split("#")[0].strip())]
    if not hosts:
        raise UsageError(f"the host file {path} names no host", hint=_ONE_A_LINE)
    for number, host in hosts:
        if not _NAME.fullmatch(host):
            raise UsageError(f"{path}:{number}: {host!r} is not a host name", hint=_ONE_A_LINE)
    return _checked([host for _, host in hosts], str(path))


def _expand(match: re.Match[str], option: str, text: str) -> Iterator[str]:
    ranges = match["ranges"]
    if ranges is None:
        yield match["head"].strip()
        return
    for part in ranges.split(","):
        low, dash, high = part.strip().partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and low.isascii() and high.isascii()):
            raise _bad(option, text)
        if int(low) > int(high) or int(high) - int(low) >= MAX_HOSTS:
            raise UsageError(
                f"{option} {text}: {part} is not a range of hosts", hint="As in --host host[0-2,4]"
            )
        for number in range(int(low), int(high) + 1):
            yield f"{match['head'].strip()}{number:0{len(low)}d}{match['tail'].strip()}"


def _bad(option: str, text: str) -> UsageError:
    return UsageError(
        f"{option} {text} is not a list of hosts", hint="As in --host host0,host1 or --host host[0-2,4]"
    )


def _checked(hosts: list[str], where: str) -> tuple[str, ...]:
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise UsageError(
                f"{where}: {host!r} is not a host name", hint="As in --host host0,host1 or --host host[0-2,4]"
            )
        if hosts.count(host) > 1:
            raise UsageError(
                f"{where} names {host} twice",
                hint="Name each host once; instances are divided evenly among them.",
            )
    return tuple(hosts)


def is_this_host(name: str) -> bool:
    """True iff the name is this host's; podrun starts such instances directly."""
    import socket

    if name in (LOCAL_HOST, "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    import psutil

    return any(name == a.address for addresses in psutil.net_if_addrs().values() for a in addresses)
