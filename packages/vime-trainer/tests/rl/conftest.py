import sys
from pathlib import Path

from hypothesis import settings

# Helpers of these tests are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

# Time limits of single examples depend on what else the machine does.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
