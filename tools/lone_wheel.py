"""Imports every module of a distribution that is installed alone, and fails when a foreign stack comes in uninvited.

Run with the interpreter of an environment that holds only that wheel and its needs: ``lone_wheel.py vime-router``.
Modules that need an extra are listed in the package's pyproject.toml under ``[tool.vime] optional-modules``.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path

FORBIDDEN = {"torch", "vllm", "ray", "megatron"}
ALLOWED = {"vime-trainer": {"torch", "megatron"}, "vime-launch": {"ray"}}


def main(package_folder: str) -> int:
    project = tomllib.loads((Path(package_folder) / "pyproject.toml").read_text())
    distribution = project["project"]["name"]
    optional = tuple(project.get("tool", {}).get("vime", {}).get("optional-modules", ()))
    name = distribution.replace("-", "_")
    root = importlib.import_module(name)
    skipped, imported = 0, 1

    def is_optional(module: str) -> bool:
        return any(module == one or module.startswith(one + ".") for one in optional)

    for module in pkgutil.walk_packages(root.__path__, name + ".", onerror=lambda _: None):
        if is_optional(module.name):
            skipped += 1
        elif not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            imported += 1
    uninvited = (FORBIDDEN - ALLOWED.get(distribution, set())) & set(sys.modules)
    foreign = {m for m in sys.modules if m.startswith("vime_") and "." not in m} - {name, "vime_proto", "vime_r3"}
    print(f"{distribution}: {imported} modules imported, {skipped} optional ones left out")
    if uninvited or foreign:
        print(f"{distribution}: came in uninvited: {', '.join(sorted(uninvited | foreign))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
