"""A certificate for 127.0.0.1, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

needed = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def certificate(folder: Path) -> tuple[str, str]:
    """Paths of a self-signed certificate and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return paths
