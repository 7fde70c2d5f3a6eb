"""`python -m dapo_runner`: the `dapo` command, for torchrun."""

import atexit
import os
import sys

from dapo_runner.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:  # threads of gloo that outlive the interpreter abort the process
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
