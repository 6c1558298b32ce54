"""``python -m vime_r3``."""

import sys

from vime_r3.cli import main

sys.exit(main())
