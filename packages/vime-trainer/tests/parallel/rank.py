"""One rank of a start of several: runs its cases one after the other and leaves what it found in a file for each."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file

from vime_proto.process import exit_with_parent


def main() -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    root, out, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).parent))
    import workload

    from vime_trainer.megatron import parallel

    wrong: list[str] = []
    for number, values in enumerate(cases, start=1):
        case = workload.Case(**values)
        try:
            found = workload.run(case, root)
        except Exception:
            print(f"case {case.name}:", file=sys.stderr)
            traceback.print_exc()
            sys.exit(1)
        here = parallel()
        save_file(
            {name: value.contiguous() for name, value in found.items()}, out / f"{case.name}-{here.rank}.safetensors"
        )
        if number == len(cases) or cases[number]["sizes"] != case.sizes:
            wrong += [f"{case.name}: {name}" for name in workload.exchange(here)]
    if here.world == 2:
        wrong += workload.refusals(root)
    (out / f"exchange-{here.rank}.json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    main()
