"""`gc-flops`: floating point operations per second of IPUs."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

TYPES = {"FP16": "float16", "FP32": "float32"}


@click.command(context_settings=HELP_OPTIONS)
@click.option("-p", "--fp", type=click.Choice(["FP16", "FP32", "FP8"]), default="FP16", help="Type [FP16].")
@click.option(
    "-d", "--device-id", "device", type=click.IntRange(0), default=0, metavar="ID", help="Device [0]."
)
@click.option("-j", "--json-output", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-l", "--low-clock-rate", is_flag=True, help="Accepted: emulated IPUs run at their full clock.")
@click.version_option(None, "-v", "--version", package_name="podrun", prog_name="gc-flops")
@server_options
def gc_flops(
    fp: str,
    device: int,
    as_json: bool,
    low_clock_rate: bool,
    api_host: str | None,
    api_port: int | None,
) -> int:
    """Multiply matrices on every tile of a device and print the modelled FLOPS of an IPU.

    Every result is compared to the bit; the exit code is 1 if a value is wrong.
    """
    from podrun.core.errors import UnsupportedError
    from podrun.monitor.matrix_load import PASSES, ProductsRun
    from podrun.monitor.tool_partition import attach, find_partition

    partition = find_partition(api_host, api_port)
    chip, ipus = partition.chip, partition.ipus_of(device)
    if fp not in TYPES:
        raise UnsupportedError(f"{chip.title} does not compute in {fp}", hint="Types: FP16, FP32.")

    def say(line: str) -> None:
        if not as_json:
            click.echo(line)

    say("Testing may take up to a minute of this host's time.")
    with attach(partition, ipus, name="gc-flops") as connection:
        say("Loading binary")
        test = ProductsRun(connection, chip, ipus.count, TYPES[fp], PASSES)
        say(f"Starting {fp} calculation")
        done = test.run()
    tera, clock_mhz = done.flops / done.modelled_s / 1e12, chip.clock_hz / 1e6
    wrong = {str(ipu): words for ipu, words in zip(ipus, done.wrong, strict=True) if words}
    if as_json:
        result = _json(fp, device, ipus.count, done, tera, clock_mhz, wrong)
        click.echo(json.dumps(result, indent=2))
    else:
        say(f"Flops per IPU ({fp}): {tera:.4f} teraFLOPS (took: {done.modelled_s:.7f} seconds)")
        say(f"IPU clock speed: {clock_mhz:.0f} MHz")
        for ipu, words in wrong.items():
            say(f"IPU {ipu}: {words} values are wrong")
        say(
            f"FLOPS and seconds are modelled. Emulation: {done.flops * ipus.count / 1e9:.1f} GFLOP in "
            f"{done.emulation_s:.2f} s{'' if wrong else ', every value right'}."
        )
    return 1 if wrong else 0


def _json(
    fp: str, device: int, ipus: int, done: Any, tera: float, clock_mhz: float, wrong: dict[str, int]
) -> dict[str, Any]:
    return {
        "device_id": str(device),
        "number_of_ipus": str(ipus),
        "fp": fp,
        "teraflops_per_ipu": f"{tera:.4f}",
        "duration_sec": f"{done.modelled_s:.9f}",
        "clock_mhz": f"{clock_mhz:.0f}",
        "result": "fail" if wrong else "pass",
        "wrong_values": {ipu: str(words) for ipu, words in wrong.items()},
        "emulation_sec": f"{done.emulation_s:.3f}",
        "modelled": ["teraflops_per_ipu", "duration_sec", "clock_mhz"],
        "emulated": ["result", "wrong_values", "emulation_sec"],
    }


def main() -> None:
    """Entry point of `gc-flops`."""
    sys.exit(run(gc_flops))


if __name__ == "__main__":
    main()
