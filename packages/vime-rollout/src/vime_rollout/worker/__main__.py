"""``python -m vime_rollout.worker``: the command ``vime-rollout worker``."""

from vime_rollout.worker._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
