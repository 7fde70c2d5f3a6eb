"""`python by_nccl.py ARGUMENT...`, started on several ranks: `dapo ARGUMENT...` with a socket in NCCL's place."""

from __future__ import annotations

import sys

from fake_nccl import SocketTransfer
from launch import leave

from dapo_runner.cli import main
from dapo_runner.rollout.server import TRANSFERS

if __name__ == "__main__":
    TRANSFERS["nccl"] = SocketTransfer
    assert main(sys.argv[1:]) == 0
    leave()
