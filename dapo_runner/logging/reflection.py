r"""Reflection counted: phrases with which a response looks back at its own reasoning.

The DAPO paper's case study (arXiv 2503.14476, "However, wait a moment, let's rethink about …") finds next to none early
in training and more later on. Others count bare words (arXiv 2503.24290: wait, recheck, retry, alternatively, however);
`however`, and a `wait` that passengers do in word problems, are not counted here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_AGAIN = "(?:s|d|ed|ing)?"
ENGLISH = {
    "wait": r"\bwait(?=\s*[,.!…—:]|\s+(?:an?\s+(?:moment|minute|second)|no|but|let|that|this|actually|maybe|what)\b)",
    "hold on": r"\bhold on\b(?! to\b)",
    "rethink": r"\bre-?think(?:s|ing)?\b",
    "recheck": rf"\bre-?check{_AGAIN}\b",
    "reconsider": rf"\bre-?consider{_AGAIN}\b",
    "re-evaluate": r"\bre-?evaluat(?:es?|ed|ing)\b",
    "re-examine": r"\bre-?examin(?:es?|ed|ing)\b",
    "revisit": rf"\brevisit{_AGAIN}\b",
    "recalculate": r"\bre-?(?:calculat|comput)(?:es?|ed|ing)\b",
    "double-check": rf"\bdouble[- ]check{_AGAIN}\b",
    "let me verify": r"\blet(?:'s|’s| us| me) (?:verify|check)\b",
    "try again": r"\b(?:try again|retry|start over)\b",
    "go back": r"\b(?:let(?:'s|’s| us| me) go back|going back to)\b",
    "mistake": r"\b(?:made|make) (?:a|an) (?:mistake|error)\b",
    "another approach": r"\b(?:another|different|alternative) (?:approach|method|way)\b|\balternatively\b",
}
_STOP = r"[,.!\uff0c\u3002\uff01…]"  # half and full width: 等等 and 不对 in the midst of a sentence mean other things
CHINESE = {
    "等等": rf"等等{_STOP}|等一下|等一等|且慢",
    "重新思考": "重新(?:思考|考虑|审视|分析|理解)|再想想|再想一想|仔细想想",
    "重新检查": "重新(?:检查|验证|核对)|再(?:检查|核对|验证)",
    "检查一下": "(?:检查|验证|验算|核对)一下|让我们?(?:检查|验证)",
    "重新计算": "重新(?:计算|求解|推导)|重算",
    "不对": rf"不对{_STOP}|算错|弄错|搞错|有误",
    "换个思路": "换(?:一种|一个|个|种)(?:思路|方法|角度|方式)|另一种(?:思路|方法)",
    "回过头": "回过头|回头看",
}
LANGUAGES = {"en": ENGLISH, "zh": CHINESE}
_NAMES = [*ENGLISH, *CHINESE]
PATTERN = re.compile("|".join(f"({rule})" for rule in (*ENGLISH.values(), *CHINESE.values())), re.IGNORECASE)


def count_reflections(text: str) -> Counter[str]:
    """How often each phrase occurs in ``text``, by its name in ``ENGLISH`` and ``CHINESE``."""
    return Counter(_NAMES[match.lastindex - 1] for match in PATTERN.finditer(text) if match.lastindex)


def reflection_metrics(texts: Iterable[str]) -> dict[str, float]:
    """`responses`: the share of the texts with at least one phrase; `en`, `zh`: phrases per text."""
    counts = [count_reflections(text) for text in texts]
    if not counts:
        return {}
    per_text = {
        language: sum(count[name] for count in counts for name in phrases) / len(counts)
        for language, phrases in LANGUAGES.items()
    }
    return {"responses": sum(bool(count) for count in counts) / len(counts), **per_text}
