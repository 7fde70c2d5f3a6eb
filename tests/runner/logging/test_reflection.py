"""Which phrases count as looking back, in English and Chinese, and which look like it and do not."""

from __future__ import annotations

import pytest

from dapo_runner.logging.reflection import CHINESE, ENGLISH, count_reflections, reflection_metrics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The two cases that the paper shows.
        (
            "However, wait a moment, let's rethink about the dihedral angle involving planes in a more thoughtful way.",
            {"wait": 1, "rethink": 1},
        ),
        ("our current approach needs to be reconsidered. Instead, we can use a different approach involving",
         {"reconsider": 1, "another approach": 1}),
        ("WAIT, no. Wait… wait! Wait, wait, that is wrong", {"wait": 5}),
        ("Let me verify this. Let’s check: let us verify", {"let me verify": 3}),
        ("We re-evaluate, reevaluate and re-examine it; double-checking, double checked", {
            "re-evaluate": 2, "re-examine": 1, "double-check": 2}),
        ("I made a mistake. Alternatively, try again.", {
            "mistake": 1, "another approach": 1, "try again": 1}),
        ("等等，这里不对。让我们重新考虑一下", {"等等": 1, "不对": 1, "重新思考": 1}),
        ("我算错了，再检查一遍，然后验证一下。换一种方法", {"不对": 1, "重新检查": 1, "检查一下": 1, "换个思路": 1}),
        ("回过头来重新计算", {"回过头": 1, "重新计算": 1}),
        ("", {}),
    ],
)  # fmt: skip
def test_what_counts(text: str, expected: dict[str, int]) -> None:
    assert count_reflections(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "She has to wait for 5 minutes at the bus stop; the waiter is waiting.",
        "However, the answer is 3.",
        "Hold on to the rope. The check is 12 dollars.",
        "A train considers nothing. Visit the evaluation of the examination.",
        "苹果、橘子等等都是水果",
        "不对称的图形",
        "There is an error bar.",
        "答案是正确的",
    ],
)
def test_what_does_not(text: str) -> None:
    assert count_reflections(text) == {}


def test_every_phrase_has_a_name_of_its_own() -> None:
    assert not ENGLISH.keys() & CHINESE.keys()


def test_figures_by_hand() -> None:
    texts = ["Wait, no. Let me verify.", "等一下，wait, 不对。", "4", "5"]
    assert reflection_metrics(texts) == {"responses": 0.5, "en": 3 / 4, "zh": 2 / 4}
    assert reflection_metrics([]) == {}
