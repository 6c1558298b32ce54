"""Generates the code of the contracts, lints them, and checks them for breaking changes.

    python scripts/generate.py            # generate in place, then lint and check
    python scripts/generate.py --check    # write nothing; fail when the committed code differs
    python scripts/generate.py --release  # after a release: take the present contracts as the image that later ones must not break

Needs grpcio-tools at the floor that pyproject.toml names for protobuf and grpcio. buf is taken from the path, or installed
from npm (@bufbuild/buf) into node_modules beside this package.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = PACKAGE / "src"
IMAGE = PACKAGE / "buf.image.binpb"
BUF_VERSION = "1.75.0"
# The generated code demands at least these versions when it is imported.
FLOORS = {"grpcio-tools": "1.74.0", "protobuf": "6.31.1"}


def generate(out: Path) -> None:
    """Writes the generated modules of every contract below `out`.

    Raises:
        SystemExit: other versions than the floors, or protoc failed.
    """
    from grpc_tools import protoc

    wrong = [f"{name} {version(name)} (needed: {floor})" for name, floor in FLOORS.items() if version(name) != floor]
    if wrong:
        raise SystemExit(f"generate with the floor versions, not with {', '.join(wrong)}")
    include = Path(protoc.__file__).parent / "_proto"
    files = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.glob("vime_proto/*/v1/*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{SOURCE}", f"-I{include}", *outputs, *files]):
        raise SystemExit("protoc failed")


def drift() -> list[str]:
    """Generated files that differ from the committed ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.relative_to(folder) for path in Path(folder).rglob("*_pb2*")}
        committed = {path.relative_to(SOURCE) for path in SOURCE.glob("vime_proto/*/v1/*_pb2*.py*")}
        same = {path for path in fresh & committed if filecmp.cmp(Path(folder) / path, SOURCE / path, shallow=False)}
        return sorted(map(str, (fresh | committed) - same))


def buf() -> str:
    """Path of buf.

    Raises:
        SystemExit: neither buf nor npm is installed.
    """
    local = PACKAGE / "node_modules" / ".bin" / "buf"
    if found := shutil.which("buf"):
        return found
    if not local.exists():
        if not shutil.which("npm"):
            raise SystemExit("buf is needed: put it on the path, or install npm")
        command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(PACKAGE)]
        subprocess.run([*command, f"@bufbuild/buf@{BUF_VERSION}"], check=True)
    return str(local)


def check(release: bool) -> bool:
    """Runs buf's lint and breaking checks; whether both passed."""
    tool = buf()
    commands = [[tool, "lint"]]
    if release or not IMAGE.exists():
        commands.append([tool, "build", "--exclude-source-info", "-o", IMAGE.name])
    else:
        commands.append([tool, "breaking", "--against", IMAGE.name])
    passed = True
    for command in commands:
        print("+", " ".join(["buf", *command[1:]]), flush=True)
        passed = subprocess.run(command, cwd=PACKAGE).returncode == 0 and passed
    return passed


def main(argv: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the committed code differs")
    parser.add_argument("--release", action="store_true", help="take the present contracts as the released ones")
    arguments = parser.parse_args(argv)
    if arguments.check:
        if different := drift():
            print("the committed code is not what the contracts generate:", *different, sep="\n  ")
            return 1
        print("the committed code is what the contracts generate")
    else:
        generate(SOURCE)
        print(f"generated {len(list(SOURCE.glob('vime_proto/*/v1/*.proto')))} contracts")
    return 0 if check(arguments.release) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
