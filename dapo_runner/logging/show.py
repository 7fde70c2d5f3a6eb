"""`dapo show RUN --step N`: print the responses of a step group by group; `--eval`: those to held-out problems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.text import Text

from dapo_runner.errors import ConfigError
from dapo_runner.files import read_jsonl
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.reflection import PATTERNS, count_reflections
from dapo_runner.logging.rollout_log import ROLLOUTS, SavedStep, read_step, saved_steps

# Control characters that move the cursor, change colours or the writing direction, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
KEYS = "Enter: next   p: previous   a number: that group   q: quit"


def find_steps(run: Path, what: str = ROLLOUTS) -> dict[int, Path]:
    """Return the files of a run's rollouts or evaluations by step. Raises ConfigError if there are none."""
    if steps := saved_steps(run / what):
        return steps
    path, kind = run / METRICS_FILE, "step" if what == ROLLOUTS else "eval"
    is_logged = path.is_file() and any(event["kind"] == kind for event in read_jsonl(path, "kind"))
    unfinished = f"No {kind} of {run} has finished." if run.is_dir() else "There is no such folder."
    untrained = "No group was trained on, logging.rollouts.groups is 0, or it is a run of dapo sft."
    advice = untrained if is_logged else unfinished
    raise ConfigError(f"{run / what}: expected the {what} of a run, found none. {advice}")


def load_step(run: Path, step: int, what: str = ROLLOUTS, number: int | None = None) -> SavedStep:
    """Return all groups of a step, or one of them. Raises ConfigError if it was not saved."""
    steps = find_steps(run, what)
    if step not in steps:
        among = f"one of {len(steps)} steps from {min(steps)} to {max(steps)}"
        raise ConfigError(f"--step: expected {among} in {run / what}, got {step}. --eval shows evaluations.")
    saved = read_step(steps[step])
    if number is None:
        return saved
    if not 1 <= number <= len(saved.groups):
        raise ConfigError(f"--group: expected 1 to {len(saved.groups)}, got {number}")
    return saved._replace(groups=[saved.groups[number - 1]])


def page(saved: SavedStep, console: Console) -> None:
    """Show one group at a time, until the last one or `q`. Without a terminal show all groups."""
    samples = [sample for group in saved.groups for sample in group["samples"]]
    turns = [turn["text"] for sample in samples for turn in _turns_of(sample) if turn["role"] == "assistant"]
    n = sum(sum(count_reflections(text).values()) for text in turns)
    phrases = f"{n} reflection phrases in {len(samples)} responses"
    console.print(f"step {saved.step}: {len(saved.groups)} of {saved.n_groups} groups saved; {phrases}", soft_wrap=True)
    current, last = 1, len(saved.groups)
    while 1 <= current <= last:
        console.print(render_group(saved.groups[current - 1], saved), soft_wrap=not console.file.isatty())
        prompt = f"[dim]group {current} of {last}   {KEYS} [/dim]"
        try:
            answer = console.input(prompt).strip().lower() if console.file.isatty() else ""
        except EOFError:  # Ctrl-D
            return
        if answer == "q":
            return
        if answer.isdecimal():
            current = min(max(int(answer), 1), last)
        else:
            current = max(current - 1, 1) if answer == "p" else current + 1


def render_group(group: dict[str, Any], saved: SavedStep) -> Group:
    """Return prompt and expected answer, then every response with its rewards and its advantage."""
    samples, prompt, answer = group["samples"], group["prompt"], group["prompt"]["answer"]
    correct = sum(sample["correct"] for sample in samples)
    title = f"step {saved.step} · group {group['group']} of {saved.n_groups} · {correct} of {len(samples)} correct"
    source = "".join(f"{name} " for name in (prompt.get("eval_set"), prompt["source"]) if name)
    parts: list[Any] = [
        Text(title, style="bold reverse"),
        Text(printable(f"{source}{prompt['id']}{f' · expected {answer}' if answer else ''}"), style="bold"),
        Text(printable(prompt["text"])),
    ]
    for sample in samples:
        response = Text()
        for turn in _turns_of(sample):
            is_policy = turn["role"] == "assistant"
            text = Text(printable(turn["text"]), "" if is_policy else "bright_black")
            for pattern in PATTERNS.values() if is_policy else ():
                text.highlight_regex(pattern, "bold yellow")
            response.append_text(text)
        parts += [Text(), Text(printable(_facts(sample)), "bold green" if sample["correct"] else "bold red"), response]
    return Group(*parts, Rule(style="dim"))


def _turns_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return sample.get("turns") or [{"role": "assistant", "text": sample["response"]}]


def _facts(sample: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {_signed(value)}" for name, value in sample.get("parts", {}).items())
    answer = f"answer {_signed(sample['base_reward'])}{f' (unweighted: {parts})' if parts else ''}"
    last = "last " if (turns := sample.get("turns")) else ""  # of several turns
    facts = [
        f"▌ sample {sample['sample']} {'correct' if sample['correct'] else 'incorrect'}",
        f"reward {_signed(sample['reward'])} = {answer} + length penalty {_signed(sample['length_penalty'])}",
        *([f"{last}advantage {_signed(sample['advantage'])}"] if "advantage" in sample else []),
        *([f"segments {', '.join(map(_segment, sample['segments']))}"] if "segments" in sample else []),
        f"{sample['tokens']} tokens{', truncated' if sample['finish_reason'] == 'length' else ''}",
        *([f"turns {', '.join(map(_turn, turns))}"] if turns else []),
        *([] if sample["extracted"] is None else [f"extracted {sample['extracted']}"]),
        *([f"rule {sample['rule']}"] if sample["rule"] else []),
        *([] if sample["trains"] else ["does not train"]),
    ]
    return " · ".join(facts)


def _turn(turn: dict[str, Any]) -> str:
    facts = [turn["role"], str(turn["end"] - turn["start"]), turn["finish_reason"]]
    return " ".join(filter(None, [*facts, "" if turn["reward"] is None else _signed(turn["reward"])]))


def _segment(segment: dict[str, Any]) -> str:
    """Return the values at the two ends of a segment and its length; in brackets if it does not train."""
    text = f"{_signed(segment['before'])} → {_signed(segment['after'])} over {segment['length']}"
    return text if segment["trains"] else f"({text})"


def printable(text: str) -> str:
    r"""Return ``text`` with every control character but newline and tab as `\x1b`."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _signed(value: float | None) -> str:
    return "not finite" if value is None else f"{value:+.3g}"
