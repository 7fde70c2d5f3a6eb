"""`dapo show`: the rollouts of a step, or its answers to held-out problems, group by group."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console

from dapo_runner.errors import ConfigError
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS
from dapo_runner.logging.show import choose_group, load_step, page, render_group, steps_table


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    console, what = Console(), EVALUATIONS if options.eval else ROLLOUTS
    try:
        if options.step is None:
            if options.group is not None or options.json:
                raise ConfigError("--step: expected beside --group and --json, got none")
            console.print(steps_table(options.run, what))
            return 0
        saved = load_step(options.run, options.step, what)
        chosen = saved.groups if options.group is None else [choose_group(saved, options.group)]
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if options.json:
        for group in chosen:
            print(json.dumps(group, ensure_ascii=False))
    elif options.group is not None:
        console.print(render_group(chosen[0], saved), soft_wrap=not console.is_terminal)
    else:
        page(saved, console)
    return 0
