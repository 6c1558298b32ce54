"""`python -m vime_trainer` is `vime-trainer`."""

import sys

from vime_trainer.cli import main

sys.exit(main())
