"""What a judge is shown: the template with texts that cannot leave their places in it.

A text of a problem, a reference or a response can neither begin another role nor close the tag that the template puts
around it. A response may still persuade a judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dapo_runner.config import JudgePrompt
from dapo_runner.rewards.verdicts import Question

# The forms in which models commonly write special tokens.
_SPECIAL = (
    r"<[|｜][^<>\s]*[|｜]>",
    r"</?(?:s|bos|eos|pad|unk|think|(?:start|end)_of_turn)>",
    r"\[/?[A-Z_]*(?:INST|TOOL|SYSTEM)[A-Z_]*\]",
    r"<</?SYS>>",
)


class Shield:
    """Breaks up by a space what could end a role or a tag: special tokens, and the tags of the template."""

    def __init__(self, template: str, tokens: Iterable[str] = ()) -> None:
        """``tokens``: special tokens of the judge's own."""
        names = set(re.findall(r"</?(\w+)>", template))
        # A tag however it is written is broken up within its name; one of a single letter has to be written as it is.
        tags = [rf"(?i:<\s*/?\s*{name[0]}(?={name[1:]}\s*>))" for name in sorted(names) if len(name) > 1]
        short = {f"<{slash}{name}>" for name in names if len(name) == 1 for slash in ("", "/")}
        own = [token for token in short | set(tokens) if len(token) > 1 and not re.search(r"\s", token)]
        others = [*map(re.escape, sorted(own, key=len, reverse=True)), *_SPECIAL]
        self._broken = re.compile("|".join([f"(?P<tag>{'|'.join(tags) or '(?!)'})", *others]))

    def __call__(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates, which no tokenizer takes
        while self._broken.search(text):
            text = self._broken.sub(_break_up, text)
        return text


def _break_up(found: re.Match[str]) -> str:
    return f"{found[0]} " if found["tag"] else f"{found[0][0]} {found[0][1:]}"


def conversation_of(prompt: JudgePrompt, question: Question, shield: Shield) -> list[dict[str, str]]:
    """Return the messages that ask a judge."""
    yes, no = prompt.answers
    fields = {name: shield(text) for name, text in question._asdict().items()} | {"yes": yes, "no": no}
    text = re.sub("{(" + "|".join(fields) + ")}", lambda found: fields[found[1]], prompt.template)
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return [*system, {"role": "user", "content": text}]
