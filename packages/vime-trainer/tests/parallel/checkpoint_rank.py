"""One rank of a start of several: hands checkpoints from layout to layout, see `checkpoint_workload`."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

from vime_proto.process import exit_with_parent


def main() -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    root, out, chains = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).parent))
    import checkpoint_workload

    from vime_trainer.megatron import parallel

    found = {}
    for values in chains:
        chain = checkpoint_workload.Chain(**values)
        try:
            found[chain.name] = checkpoint_workload.run(chain, root, out / chain.name)
            if chain.resumed:
                checkpoint_workload.check_resume(chain, root, out / f"{chain.name}-resumed")
        except Exception:
            print(f"chain {chain.name}:", file=sys.stderr)
            traceback.print_exc()
            sys.exit(1)
    (out / f"losses-{parallel().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
