"""`dapo doctor`: print what is installed, what is missing and how to install it. Needs only torch."""

from __future__ import annotations

from dapo_runner.preflight.doctor import examine


def run(*_: object) -> int:
    for finding in examine():
        print(f"{finding.what:<14} {finding.state}")
        if finding.advice:
            print(f"{'':<14} → {finding.advice}")
    return 0
