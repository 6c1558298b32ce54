"""A certificate for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: str | Path) -> tuple[str, str]:
    """Makes a self-signed certificate for 127.0.0.1, which is its own authority, valid for two days; needs ``openssl``.

    Returns:
        Paths of the certificate and of its key, in ``folder``.

    Raises:
        FileNotFoundError: there is no ``openssl``.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = str(Path(folder, "cert.pem")), str(Path(folder, "key.pem"))
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*command.split(), "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True, timeout=60
    )
    return paths
