"""`dapo show RUN --step N`: the rollouts of a step, group by group, as they were written and as they were judged; with
`--eval` the answers to held-out problems.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dapo_runner.logging.reflection import PATTERN, count_reflections
from dapo_runner.logging.rollout_log import ROLLOUTS, SavedStep, read_header, read_step, saved_steps

# A response may hold anything: what would move the cursor, change colours or turn the writing direction is spelled
# out, and what no terminal can be sent: half a surrogate pair.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
KEYS = "Enter: next   p: previous   a number: that group   q: quit"


def find_steps(run_dir: Path, what: str) -> dict[int, Path]:
    """The saved steps of a run's rollouts or evaluations. Raises FileNotFoundError when there is none."""
    steps = saved_steps(run_dir / what)
    if not steps:
        raise FileNotFoundError(
            f"{run_dir / what}: expected the {what} of a run, found none (logging.{what}.groups says how many "
            "groups of each step are kept)"
        )
    return steps


def load_step(run_dir: Path, step: int, what: str = ROLLOUTS) -> SavedStep:
    """Raises FileNotFoundError when the step was not kept, saying which were."""
    steps = find_steps(run_dir, what)
    if step not in steps:
        raise FileNotFoundError(f"{run_dir}: expected a step of {_spans(list(steps))}, which are kept, got {step}")
    return read_step(steps[step])


def choose_group(saved: SavedStep, number: int) -> dict[str, Any]:
    """Raises ValueError when it was not kept."""
    if not 1 <= number <= len(saved.groups):
        raise ValueError(
            f"--group: expected 1 to {len(saved.groups)}, the groups kept of {saved.n_groups} in step {saved.step}, "
            f"got {number}"
        )
    return saved.groups[number - 1]


def steps_table(run_dir: Path, what: str = ROLLOUTS) -> Table:
    """What is kept of a run, a line for each step; means over all groups of the step."""
    table = Table(box=None, header_style="bold")
    for heading in ("step", "groups kept", "of", "reward", "right", "tokens"):
        table.add_column(heading, justify="right")
    for path in find_steps(run_dir, what).values():
        head = read_header(path)
        reward = "" if head["reward"] is None else f"{head['reward']:+.2f}"
        table.add_row(
            *(str(head[key]) for key in ("step", "kept", "groups")),
            *(reward, f"{head['accuracy']:.0%}", f"{head['length']:.0f}"),
        )
    return table


def page(saved: SavedStep, console: Console) -> None:
    """One group at a time, until the last or `q`. Where nobody can press a key: all of them."""
    if not console.is_terminal:
        console.print(step_line(saved), soft_wrap=True)
        for group in saved.groups:
            console.print(render_group(group, saved), soft_wrap=True)
        return
    place, last = 1, len(saved.groups)
    console.print(step_line(saved))
    while 1 <= place <= last:
        console.print(render_group(saved.groups[place - 1], saved))
        answer = console.input(f"[dim]group {place} of {last}   {KEYS} [/dim]").strip().lower()
        if answer == "q":
            return
        if answer.isdecimal():
            place = min(max(int(answer), 1), last)
        else:
            place = max(place - 1, 1) if answer == "p" else place + 1


def step_line(saved: SavedStep) -> Text:
    """What is kept of the step, and the reflection phrases in it."""
    responses = [sample["response"] for group in saved.groups for sample in group["samples"]]
    counts = [count_reflections(response) for response in responses]
    total: Counter[str] = sum(counts, Counter())
    phrases = ", ".join(f"{name} {count}" for name, count in total.most_common()) or "none"
    return Text(
        f"step {saved.step}: {len(saved.groups)} of {saved.n_groups} groups kept; reflection phrases: {phrases} "
        f"(in {sum(map(bool, counts))} of {len(responses)} responses)",
        style="dim",
    )


def render_group(group: dict[str, Any], saved: SavedStep) -> Group:
    """Prompt, expected answer, and every response under its rewards and its advantage."""
    samples, prompt = group["samples"], group["prompt"]
    right = sum(sample["correct"] for sample in samples)
    title = f"step {saved.step} · group {group['group']} of {saved.n_groups} · {right} of {len(samples)} right"
    source = "".join(f"{name} " for name in (prompt.get("eval_set"), prompt["source"]) if name)
    parts: list[Any] = [
        Text(title, style="bold reverse"),
        Text(printable(f"{source}{prompt['id']} · expected {prompt['answer']}"), style="bold"),
        Text(printable(prompt["text"])),
    ]
    for sample in samples:
        parts += [Text(), _verdict(sample), _response(sample)]
    return Group(*parts, Rule(style="dim"))


def _verdict(sample: dict[str, Any]) -> Text:
    colour = "green" if sample["correct"] else "red"
    nothing_read = "no answer extracted" if sample["correct"] else "no answer found"
    read = nothing_read if sample["extracted"] is None else f"read {sample['extracted']}"
    parts = ", ".join(f"{name} {_signed(value)}" for name, value in sample.get("parts", {}).items())
    facts = [
        f"reward {_signed(sample['reward'])} = answer {_signed(sample['base_reward'])} "
        f"{f'({parts}) ' if parts else ''}+ length {_signed(sample['length_penalty'])}",
        *([f"advantage {_signed(sample['advantage'])}"] if "advantage" in sample else []),
        *([f"segments {_segments(sample['segments'])}"] if "segments" in sample else []),
        f"{sample['tokens']} token{'s' if sample['tokens'] != 1 else ''}, "
        + ("cut at the limit" if sample["finish_reason"] == "length" else "ended itself"),
        read + (f" ({sample['rule']})" if sample["rule"] else ""),
        *([] if sample["trains"] else ["left out of the loss"]),
    ]
    line = Text(f"▌ sample {sample['sample']} {'right' if sample['correct'] else 'wrong'} ", style=f"bold {colour}")
    return line.append(printable(" · ".join(facts)), style="not bold")


def _segments(segments: list[dict[str, Any]]) -> str:
    """Values at their ends and lengths: +0.3 → +0.7 over 12, +0.7 → +1 over 5; in brackets those that do not train."""
    told = [f"{_signed(part['before'])} → {_signed(part['after'])} over {part['length']}" for part in segments]
    return ", ".join(text if part["trains"] else f"({text})" for text, part in zip(told, segments, strict=True))


def _response(sample: dict[str, Any]) -> Text:
    """The response, its reflection phrases marked."""
    text = Text(printable(sample["response"]))
    text.highlight_regex(PATTERN, "bold yellow")
    return text


def printable(text: str) -> str:
    r"""``text`` with every control character but newline and tab as `\x1b`."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _signed(value: float | None) -> str:
    return "not finite" if value is None else f"{value:+.3g}"


def _spans(steps: list[int]) -> str:
    """1–4, 7, 9–12."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in spans)
