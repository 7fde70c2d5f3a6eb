"""Which phrases count as looking back, in English and Chinese, and which look like it and do not."""

from __future__ import annotations

import pytest

from dapo_runner.logging.reflection import count_reflections, reflection_metrics


@pytest.mark.parametrize(
    ("text", "english", "chinese"),
    [
        # The two cases that the paper shows.
        ("However, wait a moment, let's rethink about the dihedral angle in a more thoughtful way.", 2, 0),
        ("our approach needs to be reconsidered. Instead, we can use a different approach involving", 2, 0),
        ("WAIT, no. Wait… wait! Wait, wait, that is wrong", 5, 0),
        ("Let me verify this. Let’s check: let us verify", 3, 0),
        ("We re-evaluate, reevaluate and re-examine it; double-checking, double checked", 5, 0),
        (
            "I made a mistake. Alternatively, try again. Hold on, going back to 3 I recheck, revisit, recompute",
            8,
            0,
        ),
        ("等等，这里不对。让我们重新考虑一下", 0, 3),
        ("我算错了，再检查一遍，然后验证一下。换一种方法", 0, 4),
        ("回过头来重新计算", 0, 2),
        ("", 0, 0),
        ("She has to wait for 5 minutes at the bus stop; the waiter is waiting.", 0, 0),
        ("However, the answer is 3.", 0, 0),
        ("Hold on to the rope. The check is 12 dollars.", 0, 0),
        ("A train considers nothing. Visit the evaluation of the examination.", 0, 0),
        ("苹果、橘子等等都是水果", 0, 0),
        ("不对称的图形", 0, 0),
        ("There is an error bar.", 0, 0),
        ("答案是正确的", 0, 0),
    ],
)
def test_what_counts(text: str, english: int, chinese: int) -> None:
    assert count_reflections(text) == {"en": english, "zh": chinese}


def test_figures_by_hand() -> None:
    texts = ["Wait, no. Let me verify.", "等一下，wait, 不对。", "4", "5"]
    assert reflection_metrics(texts) == {"responses": 0.5, "en": 3 / 4, "zh": 2 / 4}
