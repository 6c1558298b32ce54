"""The contract's own suites against real engines."""

import subprocess
import sys

from pushing import manifest_of

from vime_proto.version import policy_version


def suite(name, engine, *options):
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "vime_proto.conformance.plugin", "-p", "no:cacheprovider",
        "--pyargs", f"vime_proto.conformance.{name}", "--target", engine.address, "--rootdir", str(engine.root), "-rs", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=engine.root)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_rollout(moe):
    suite("rollout", moe)


def test_engine_control(moe):
    folder = moe.root / "manifest"
    manifest, parts = manifest_of(moe.tensors, policy_version("test-run", 0, 1))
    (folder / "rank0").mkdir(parents=True)
    (folder / "manifest.pb").write_bytes(manifest.SerializeToString())
    (folder / "rank0" / "0.bin").write_bytes(parts["rank0"][0])
    for kind in ("file", "shm"):
        moe.pusher(kind)  # makes the folder
    output = suite(
        "engine_control", moe, "--manifest-dir", str(folder),
        "--file-root", str(moe.root / "files"), "--shm-root", str(moe.root / "shm"),
    )  # fmt: skip
    assert "--manifest-dir" not in output and "the target has no transport" not in output
    moe.skip_versions_below(moe.status().version.number)
