"""The suite that every implementation of BufferService must pass, against a process of our own."""

import json
import subprocess
import sys


def test_the_conformance_suite_passes(process, tmp_path, jsonl):
    questions = jsonl("questions.jsonl", [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(3)])
    config = tmp_path / "buffer.toml"
    config.write_text(
        f'lease_ttl_seconds = 2.0\n[evaluation.conformance]\npath = "{questions}"\nanswer_field = "answer"\n'
    )
    server = process("--config", str(config))
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "vime_proto.conformance.plugin"),
            *("--pyargs", "vime_proto.conformance.buffer", "--target", server.address, f"--junitxml={report}"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    text = report.read_text()
    assert 'failures="0"' in text and 'errors="0"' in text, json.dumps(text[:500])
