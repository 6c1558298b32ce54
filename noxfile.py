"""Every task of the project. ``nox --list`` names them; the two that a new user needs are ``demo`` and ``tests``.

Environments are made by tools/venvs.py in .venvs/, one per stage, from the locks in locks/. Pip's own settings
(PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, its configuration file) are passed on as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import venvs

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"
ROOT = Path(__file__).parent
STAGES = ("buffer", "router", "engine", "worker", "trainer")
JUNIT = ROOT / ".venvs" / "junit"

# name of the run: (session, environment, folder, arguments of pytest). Long ones come first: `tests` begins with them.
RUNS = {
    "end-to-end": ("vime-launch", "launch", "integration", ["tests/e2e"]),
    "engine": ("vime-rollout", "engine", "packages/vime-rollout", ["tests/engine"]),
    "trainer-rl": ("vime-trainer", "trainer", "packages/vime-trainer", ["tests/rl"]),
    "trainer": ("vime-trainer", "trainer", "packages/vime-trainer", ["tests", "--ignore=tests/rl"]),
    # Its tests wait for processes more than they compute.
    "launch": ("vime-launch", "launch", "integration", ["tests", "--ignore=tests/e2e"]),
    "buffer": ("vime-buffer", "buffer", "packages/vime-buffer", ["tests"]),
    "router": ("vime-router", "router", "packages/vime-router", ["tests"]),
    "worker": ("vime-rollout", "worker", "packages/vime-rollout", ["tests", "--ignore=tests/engine"]),
    "proto": ("vime-proto", "proto", "packages/vime-proto", ["tests"]),
    "r3-megatron": ("vime-r3", "trainer", "packages/vime-r3", ["tests/megatron"]),
    # At the floor the contracts count; that fakes pass their suites is seen at the newest.
    "proto-floor": ("vime-proto", "tools", "packages/vime-proto", ["tests", "--ignore=tests/test_fakes_conform.py"]),
    "r3": ("vime-r3", "r3", "packages/vime-r3", ["tests", "--ignore=tests/megatron"]),
}
# Which environment holds a distribution alone.
LONE = {
    "vime-proto": "proto", "vime-r3": "r3", "vime-buffer": "buffer", "vime-router": "router",
    "vime-rollout": "worker", "vime-trainer": "trainer", "vime-launch": "launch",
}  # fmt: skip


def _stage_environment() -> dict[str, str]:
    """Where the launcher and its tests find each stage's interpreter."""
    return {f"VIME_PYTHON_{stage.upper()}": str(venvs.ensure(stage)) for stage in (*STAGES, "launch")}


def _pytest(session: nox.Session, name: str, *more: str, aside: bool = False) -> bool:
    """Runs the tests of one entry of RUNS; ``aside`` keeps their output back until they are done."""
    _, environment, folder, arguments = RUNS[name]
    # Runs share the cores: OpenMP's threads would spin while they wait, and take them from one another.
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if name == "proto-floor":
        env["PYTHONPATH"] = str(ROOT / folder / "src")
    if name in ("end-to-end", "engine", "r3"):
        # The engine's tests hold its numbers to the trainer's, which lives in another environment.
        env |= _stage_environment()
    JUNIT.mkdir(parents=True, exist_ok=True)
    report = JUNIT / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [str(venvs.python(environment)), "-m", "pytest", "-q", f"--junitxml={report}", *arguments, *more]
    session.log(f"{name}: pytest in {folder} with .venvs/{environment}")
    begun = time.monotonic()
    ended_well = _run(name, command, ROOT / folder, env, aside)
    session.log(f"{name}: {time.monotonic() - begun:.0f} s")
    passed, failed, _ = _counts(name)
    return ended_well and passed > 0 and failed == 0


def _run(name: str, command: list[str], folder: Path, env: dict[str, str], aside: bool) -> bool:
    """Whether a command ended well; ``aside`` keeps its output back until it is done."""
    done = subprocess.run(
        command, cwd=folder, env=env, check=False, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if aside else None, stderr=subprocess.STDOUT if aside else None,
    )  # fmt: skip
    if aside:
        print(f"----- {name}\n{done.stdout}", flush=True)
    return done.returncode == 0


def _counts(name: str) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of a run; a run that left no report failed."""
    report = JUNIT / f"{name}.xml"
    if not report.exists():
        return 0, 1, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def _sources() -> str:
    return os.pathsep.join(str(folder / "src") for folder in venvs.PACKAGES.values())


Command = tuple[list[str], dict[str, str]]


def _lint() -> list[Command]:
    python = venvs.ensure("tools")
    return [
        ([str(python), "-m", "ruff", "check", "."], {}),
        ([str(python.parent / "lint-imports"), "pyproject.toml", "--no-cache"], {"PYTHONPATH": _sources()}),
    ]


def _lone_wheel() -> list[Command]:
    return [
        ([str(venvs.ensure(environment)), "-I", "tools/lone_wheel.py", str(venvs.PACKAGES[distribution])], {})
        for distribution, environment in LONE.items()
    ]


CHECKS = {"lint": _lint, "lone-wheel": _lone_wheel}


def _check(name: str) -> bool:
    """Runs the commands of a check; shows their output when they are done."""
    # All of them, also after one that failed.
    return all([_run(name, command, ROOT, os.environ | env, aside=True) for command, env in CHECKS[name]()])


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and the import rules."""
    for command, env in _lint():
        session.run(*command, env=env, external=True)


@nox.session(name="lone-wheel")
def lone_wheel(session: nox.Session) -> None:
    """Installs each wheel alone, imports everything, and fails when a foreign stack comes in."""
    for command, _ in _lone_wheel():
        session.run(*command, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything: lint, import rules, contract drift, all packages, end to end. Ends with the totals."""
    started = time.monotonic()
    for stale in JUNIT.glob("*.xml"):
        stale.unlink()
    venvs.ensure_all(spec[1] for spec in RUNS.values())
    session.log(f"environments: {time.monotonic() - started:.0f} s")
    # Much of the time is starting processes and waiting for them: two runs side by side.
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {name: pool.submit(_pytest, session, name, *session.posargs, aside=True) for name in RUNS}
        jobs |= {name: pool.submit(_check, name) for name in CHECKS}
        failed = [name for name, job in jobs.items() if not job.result()]
    counts = [sum(column) for column in zip(*map(_counts, RUNS), strict=True)]
    line = f"{counts[0]} passed, {counts[1] + len([f for f in failed if f not in RUNS])} failed, {counts[2]} skipped"
    (JUNIT / "totals.txt").write_text(line + "\n")
    session.log(f"{time.monotonic() - started:.0f} s in all")
    if failed:
        session.error(f"failed: {', '.join(failed)} ({line})")
    print(line, flush=True)


def _package_session(name: str) -> None:
    @nox.session(name=name)
    def package(session: nox.Session) -> None:
        runs = [run for run, spec in RUNS.items() if spec[0] == name]
        for run in runs:
            venvs.ensure(RUNS[run][1])
        failed = [run for run in runs if not _pytest(session, run, *session.posargs)]
        if failed:
            session.error(f"failed: {', '.join(failed)}")

    package.__doc__ = f"Tests of {name}, each in an environment that holds only what it needs."


for _name in venvs.PACKAGES:
    _package_session(_name)


@nox.session
def demo(session: nox.Session) -> None:
    """Trains a tiny model by reinforcement learning through all five processes: SFT, then GRPO with routing replay."""
    env = _stage_environment()
    session.run(env["VIME_PYTHON_LAUNCH"], "-m", "vime_launch", "demo", *session.posargs, env=env, external=True)


@nox.session
def algorithms(session: nox.Session) -> None:
    """PPO, GRPO and GSPO on the demo's task, each from the same warmed-up model; draws docs/algorithms.png."""
    env = _stage_environment()
    script = "integration/benchmarks/compare_algorithms.py"
    session.run(env["VIME_PYTHON_LAUNCH"], script, *session.posargs, env=env, external=True)


@nox.session
def proto(session: nox.Session) -> None:
    """Generates the code of the contracts, lints them, and checks them for breaking changes with buf."""
    python = venvs.ensure("tools")
    session.run(str(python), "packages/vime-proto/scripts/generate.py", *session.posargs, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Runs the benchmarks; arguments choose some by name."""
    env = _stage_environment()
    environment = {"vime-proto": "proto", "vime-r3": "r3", "vime-buffer": "buffer", "vime-router": "router",
                   "vime-rollout": "engine", "vime-trainer": "trainer", "vime-launch": "launch"}  # fmt: skip
    for distribution, folder in venvs.PACKAGES.items():
        for script in sorted((folder / "benchmarks").glob("bench_*.py")):
            if session.posargs and not any(word in script.name for word in session.posargs):
                continue
            session.log(f"{distribution}: {script.name}")
            session.run(str(venvs.ensure(environment[distribution])), str(script), env=env, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """On a GPU host: GPU tests, then the demo, all stages in the present environment.

    It must hold our distributions (installed, since vLLM finds its plug-in by entry point) and what they need.
    """
    python = sys.executable
    env = {f"VIME_PYTHON_{stage.upper()}": python for stage in STAGES}
    tests = [f"packages/vime-trainer/tests/{name}.py" for name in ("test_gpu", "test_gpu_transformer_engine")]
    session.run(python, "-m", "pytest", "-q", *tests, external=True)
    share = "engine.config.vllm.gpu_memory_utilization=0.3"
    # vLLM's float32 kernels multiply in TF32 there: 1e-4 to 6e-4 nats were seen.
    demo = ["demo", "--name", "gpu", "--max-difference", "2e-3", "--set", share]
    session.run(python, "-m", "vime_launch", *demo, *session.posargs, env=env, external=True)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolves the locks anew; arguments name environments, none takes all."""
    for name in session.posargs or venvs.VENVS:
        session.log(f"locking {name}")
        venvs.relock(name)
