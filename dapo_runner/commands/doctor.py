"""`dapo doctor`: what is installed, what is missing and how to get it. Needs torch alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dapo_runner.preflight.doctor import examine


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    for finding in examine():
        print(f"{finding.what:<14} {finding.state}")
        if finding.advice:
            print(f"{'':<14} → {finding.advice}")
    return 0
