import subprocess
import sys

import vime_router
import vime_router.policies


def test_exported_names():
    assert vime_router.__all__ == [
        "Candidate",
        "Policy",
        "RouterSettings",
        "__version__",
        "make_policy",
        "policy_names",
        "serve",
    ]
    assert vime_router.policies.__all__ == ["Candidate", "Policy", "make_policy", "policy_names"]


def test_importing_everything_brings_in_no_framework():
    code = (
        "import pkgutil, sys, vime_router\n"
        "[__import__(m.name) for m in pkgutil.walk_packages(vime_router.__path__, 'vime_router.')"
        " if not m.name.endswith('__main__')]\n"
        "print(sorted({'torch', 'vllm', 'megatron', 'ray', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
