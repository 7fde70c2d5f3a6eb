"""`python -m dapo_runner`: the `dapo` command, for torchrun."""

import sys

from dapo_runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
