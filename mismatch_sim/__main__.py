"""``python -m mismatch_sim``, the same as ``mismatch-sim``."""

import sys

from mismatch_sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
