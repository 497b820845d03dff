"""Certificates for tests, made with the ``openssl`` command: an authority, and the certificates that it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

MISSING = "" if shutil.which("openssl") else "the command openssl"
"""The reason why such tests cannot run here."""
_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.ca = directory / "ca.pem"
        _openssl(
            "req",
            "-x509",
            *_NEW,
            "-keyout",
            directory / "ca.key",
            "-out",
            self.ca,
            "-subj",
            "/CN=test",
            "-days",
            2,
        )

    def host(
        self, name: str, alternatives: str = "DNS:localhost,IP:127.0.0.1", days: int = 1
    ) -> dict[str, str]:
        """The variables for a host with a new certificate; ``days`` below 0: one that has expired."""
        cert, key, request = (self.directory / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternatives}")
        _openssl("req", *_NEW, "-keyout", key, "-out", request, *names)
        signed = ("-CA", self.ca, "-CAkey", self.directory / "ca.key", "-copy_extensions", "copy")
        _openssl("x509", "-req", "-in", request, *signed, "-days", days, "-out", cert)
        key.chmod(0o600)
        return {"PODRUN_TLS_CERT": str(cert), "PODRUN_TLS_KEY": str(key), "PODRUN_TLS_CA": str(self.ca)}


def _openssl(*words: object) -> None:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
