"""`python by_nccl.py FOLDER ARGUMENT...`, started on several ranks: `dapo ARGUMENT...` with files in NCCL's place."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from fake_nccl import FileGroup
from launch import leave

from dapo_runner.cli import main
from dapo_runner.rollout import nccl

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    FileGroup.folder = Path(folder)
    nccl.Group = FileGroup  # type: ignore[assignment,misc]
    nccl.make_unique_id = lambda: secrets.token_hex(64).encode()
    nccl.NCCLTransfer.check = lambda config: None
    assert main(arguments) == 0
    leave()
