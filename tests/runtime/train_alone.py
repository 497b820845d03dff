"""Trains, saves and reports with the tiny front end, and prints the modules that this imported."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from podrun.runtime.settings import RunSettings
from tests.runtime.tiny import Descent, Network, TinySession, data


def main() -> None:
    """See the module docstring."""
    network = Network(rows=2, stages=2, means=True, noise=0.1)
    settings = RunSettings(
        replicas=2,
        local_replicas=2,
        accumulates=True,
        accumulation=3,
        pipelined=True,
        stochastic_rounding=True,
    )
    session = TinySession(
        network.model(),
        ["loss"],
        network.settings(settings),
        loss="loss",
        optimizer=Descent(0.1),
        ipus=network.stages,
    )
    with session, tempfile.TemporaryDirectory() as folder:
        session.run(**data(12))
        session.parts.transfer.restore(*session.parts.transfer.checkpoint())
        session.read("w0")
        session.parts.reports.summary()
        session.parts.files.save(str(Path(folder) / "tiny.popef"))
    sys.stdout.write("\n".join(sorted(sys.modules)))


if __name__ == "__main__":
    main()
