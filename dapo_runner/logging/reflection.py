"""Count the phrases with which a response reflects on its own reasoning, by language.

The DAPO paper's case study (arXiv 2503.14476, "However, wait a moment, let's rethink about …") finds almost none early
in training and more later. `however` does not count, nor does `wait` as in word problems about passengers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ENGLISH = (
    r"\bwait(?=\s*[,.!…—:]|\s+(?:an?\s+(?:moment|minute|second)|no|but|let|that|this|actually|maybe|what)\b)",
    r"\bhold on\b(?! to\b)",
    r"\bre-?think(?:s|ing)?\b",
    r"\b(?:re-?check|re-?consider|revisit|double[- ]check)(?:s|d|ed|ing)?\b",
    r"\bre-?(?:evaluat|calculat|comput)(?:es?|ed|ing)\b",
    r"\bre-?examin(?:es?|ed|ing)\b",
    r"\blet(?:'s|’s| us| me) (?:verify|check|go back)\b|\bgoing back to\b",
    r"\b(?:try again|retry|start over)\b",
    r"\b(?:made|make) (?:a|an) (?:mistake|error)\b",
    r"\b(?:another|different|alternative) (?:approach|method|way)\b|\balternatively\b",
)
_STOP = r"[,.!\uff0c\u3002\uff01…]"  # half and full width; without it, 等等 and 不对 mean other things
CHINESE = (
    rf"等等{_STOP}|等一下|等一等|且慢",
    "重新(?:思考|考虑|审视|分析|理解)|再想想|再想一想|仔细想想",
    "重新(?:检查|验证|核对)|再(?:检查|核对|验证)",
    "(?:检查|验证|验算|核对)一下|让我们?(?:检查|验证)",
    "重新(?:计算|求解|推导)|重算",
    rf"不对{_STOP}|算错|弄错|搞错|有误",
    "换(?:一种|一个|个|种)(?:思路|方法|角度|方式)|另一种(?:思路|方法)",
    "回过头|回头看",
)
PATTERNS = {  # The first letter rules out most places of a text, which halves the time.
    "en": re.compile(rf"(?-i:(?=[whrdlgtmsaWHRDLGTMSA]))(?:{'|'.join(ENGLISH)})", re.IGNORECASE),
    "zh": re.compile(f"(?=[等且重再仔检验核让算不弄搞有换另回])(?:{'|'.join(CHINESE)})"),
}


def count_reflections(text: str) -> dict[str, int]:
    return {name: 0 if name == "zh" and text.isascii() else len(PATTERNS[name].findall(text)) for name in PATTERNS}


def reflection_metrics(texts: Sequence[str]) -> dict[str, float]:
    """Return `responses`, the share of texts with at least one phrase, and `en`, `zh`, the phrases per text."""
    counts = [count_reflections(text) for text in texts]
    per_text = {language: sum(count[language] for count in counts) / len(texts) for language in PATTERNS}
    return {"responses": sum(any(count.values()) for count in counts) / len(texts), **per_text}
