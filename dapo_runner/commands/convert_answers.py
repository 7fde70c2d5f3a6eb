"""`dapo convert-answers`: rewrite problems so that their answers are integers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dapo_runner.commands.output import quiet_libraries
from dapo_runner.config import ConvertConfig, apply_overrides, parse
from dapo_runner.tools.convert import beside, convert_answers


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = parse(apply_overrides({}, overrides), ConvertConfig)
    quiet_libraries()
    counts = convert_answers(options.source, options.out, config, lambda text: print(text, flush=True))
    print(f"{counts.pop('kept', 0)} kept: {options.out}")
    print(f"{counts.total()} rejected: {beside(options.out, 'rejected')}")
    for reason, count in counts.most_common():
        print(f"  {count}  {reason}")
    return 0
