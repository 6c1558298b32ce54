import subprocess
import sys

import vime_r3
import vime_r3.agreement
import vime_r3.capture
import vime_r3.cli
import vime_r3.layout
import vime_r3.load
import vime_r3.shards
import vime_r3.storage
import vime_r3.trace


def test_exported_names():
    assert vime_r3.__all__ == ["__version__"]
    assert vime_r3.trace.__all__ == [
        "Routes",
        "byte_ranges",
        "check_header",
        "concatenate",
        "decode",
        "dumps",
        "encode",
        "extend",
        "hole_count",
        "id_dtype",
        "loads",
        "pad",
        "remark",
        "select",
        "truncate",
    ]
    assert vime_r3.capture.__all__ == ["from_vllm"]
    assert vime_r3.layout.__all__ == ["pack", "take"]
    assert vime_r3.cli.__all__ == ["main"]
    assert vime_r3.load.__all__ == ["Load", "expert_load"]
    assert vime_r3.shards.__all__ == ["join_layers", "layer_range", "layer_ranges", "payload_bytes", "row_ranges"]
    assert vime_r3.storage.__all__ == ["TraceFiles"]
    assert vime_r3.agreement.__all__ == ["Agreement", "compare"]


def test_base_modules_import_no_framework():
    code = (
        "import sys, vime_r3.trace, vime_r3.capture, vime_r3.layout, vime_r3.agreement, vime_r3.storage\n"
        "import vime_r3.cli, vime_r3.load, vime_r3.shards\n"
        "print(sorted({'torch', 'vllm', 'megatron', 'ray', 'zstandard', 'fsspec', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
