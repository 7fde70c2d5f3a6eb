"""Reward functions of the user's own: what they may return, and what happens where they fail or hang."""

from __future__ import annotations

import signal
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

import pytest
from builders import make_completion, make_config, make_prompt
from refusals import refused
from small import small_recipe, write_recipe

from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.cli import main
from dapo_runner.config import Config, parse_config
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.rewards.reward import RewardError
from dapo_runner.rewards.scoring import Scorer, load_reward
from dapo_runner.rollout.group_buffer import SamplingExhaustedError
from dapo_runner.train import train
from dapo_runner.types import Completion, Prompt, Verdict

PROMPT = make_prompt("what is it?", answer="7")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that plug-ins are imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def load(folder: Path, name: str, body: str, **reward: object) -> Callable[[Prompt, Completion], Verdict]:
    """The reward function ``judge`` of a module of that name, of one response."""
    text = "import enum, random, re, sys, time, numpy as np\nfrom dapo_runner.types import Verdict\n" + textwrap.dedent(
        body
    )
    (folder / f"{name}.py").write_text(text)
    config = make_config(reward={"kind": f"{name}:judge", "calls": {"retries": 0}, **reward}).reward
    judge = load_reward(config, config.kind)
    return lambda prompt, completion: judge.judge([prompt], [[completion]])[0][0]


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ("Verdict(True, '7', 'mine', 0.25)", Verdict(True, "7", "mine", 0.25)),
        ("Verdict(True, rule=np.str_('mine'))", Verdict(True, rule="mine")),
        ("Verdict(True, rule=enum.StrEnum('Rule', ['mine']).mine)", Verdict(True, rule="mine")),
        ("Verdict(True, rule=enum.Enum('Rule', {'MINE': 'mine'}, type=str).MINE)", Verdict(True, rule="mine")),
        ("True", Verdict(True)),
        ("False", Verdict(False)),
        ("1.0", Verdict(True, value=1.0)),
        ("1", Verdict(True, value=1.0)),
        ("0.25", Verdict(True, value=0.25)),
        ("0", Verdict(False, value=0.0)),  # half-way between wrong (−1) and correct (1): not above it
        ("-0.5", Verdict(False, value=-0.5)),
        ("__import__('numpy').float32(0.5)", Verdict(True, value=0.5)),
        ("__import__('numpy').bool_(True)", Verdict(True)),
        ("__import__('torch').tensor(-2.0)", Verdict(False, value=-2.0)),
        ("Verdict(np.bool_(True), np.str_('7'), 'mine', np.float64(0.25))", Verdict(True, "7", "mine", 0.25)),
    ],
)
def test_what_a_plugin_may_return(modules: Path, returned: str, wanted: Verdict) -> None:
    name = f"returns_{abs(hash(returned))}"
    verdict = load(modules, name, f"def judge(p, c): return {returned}")(PROMPT, make_completion())
    assert verdict == wanted
    for value, plain in zip(astuple(verdict), astuple(wanted), strict=True):  # a checkpoint holds nothing else
        assert type(value) is type(plain)


def test_a_number_is_right_above_the_middle_of_the_configured_rewards(modules: Path) -> None:
    judge = load(modules, "middle", "def judge(p, c): return float(c.text)", correct=1.0, incorrect=0.0)
    verdicts = [judge(PROMPT, make_completion(text=text)) for text in ("0.5", "0.55")]
    assert verdicts == [Verdict(False, value=0.5), Verdict(True, value=0.55)]
    config = make_config(reward={"kind": "middle:judge", "overlong": {"soft_punishment": False}})
    (group,) = Scorer(config)([PROMPT], [[make_completion(text="0.3"), make_completion(text="-0.3")]])
    assert [sample.reward for sample in group.samples] == [0.3, -0.3]
    assert group.has_mixed_correctness


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return '1.0'", "Verdict.*str"),
        ("return float('nan')", r"ValueError: .*\bnan\b"),
        ("return Verdict(True, value=float('inf'))", r"ValueError: .*\binf\b"),
        ("return [][3]", r"IndexError: list index out of range \(fails_\w+\.py:3\)"),
        ("return inner(1)", r"ValueError: not this one \(fails_\w+\.py:5\)"),
        ("sys.exit(0)", r"SystemExit: 0 \(fails_\w+\.py:3\)"),
    ],
)
def test_an_error_names_the_plugin_the_prompt_and_the_text(modules: Path, body: str, reason: str) -> None:
    name = f"fails_{abs(hash(body))}"
    judge = load(modules, name, f"def judge(p, c): {body}\ndef inner(x):\n    raise ValueError('not this one')\n")
    with pytest.raises(RewardError, match=reason) as caught:
        judge(PROMPT, make_completion(text="it is\n" + "very " * 1000 + "good"))
    message = str(caught.value)
    assert message.startswith(f"reward {name}:judge: ")
    assert "what is it?" in message
    assert r"'it is\nvery" in message
    assert "very good'" in message
    assert "\n" not in message
    assert len(message) < 1500


HANGING = {
    "loops": "while True: pass",
    "sleeps": "time.sleep(60)",
    "backtracks": "re.match('(a+)+$', 'a' * 60 + 'b')",  # holds the interpreter's lock
    "forgives": """
        try:
            time.sleep(60)
        except Exception:
            pass
        return 0.0""",
    "joins a thread that hangs": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as pool:
            pool.submit(time.sleep, 4).result()
        return 0.0""",
    "tries again": """
        for _ in range(3):
            try:
                time.sleep(60)
            except:
                pass
        return 0.0""",
    "forgives all": """
        try:
            time.sleep(60)
        except:
            return 0.0""",
}


@pytest.mark.parametrize("how", HANGING)
def test_a_plugin_that_hangs_is_ended_and_never_a_silent_zero(modules: Path, how: str) -> None:
    name = f"hangs_{how.replace(' ', '_')}"
    body = textwrap.indent(textwrap.dedent(HANGING[how]), "    ")
    judge = load(modules, name, f"def judge(p, c):\n{body}", plugin_deadline=0.2)
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(RewardError, match=rf"{name}:judge: .*reward\.plugin_deadline"):
        judge(PROMPT, make_completion(text="a text"))
    assert time.monotonic() - start < 8
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_deadline_that_did_not_strike_leaves_nothing_behind(modules: Path) -> None:
    judge = load(modules, "quick", "def judge(p, c): return 1.0", plugin_deadline=0.2)
    assert judge(PROMPT, make_completion()).correct
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert load(modules, "free", "def judge(p, c): return 1.0", plugin_deadline=None)(PROMPT, make_completion()).correct
    found: list[Verdict] = []  # outside the main thread Python takes no signals: no deadline
    thread = threading.Thread(target=lambda: found.append(judge(PROMPT, make_completion())))
    thread.start()
    thread.join()
    assert found == [Verdict(True, value=1.0)]


# Judges by lot, as exact resume has to bear, and fails at its ``bomb``-th call while that file is there.
FRAGILE = """
import random
from pathlib import Path
calls = 0
def judge(prompt, completion):
    global calls
    calls += 1
    bomb = Path(__file__).with_name("bomb")
    if bomb.exists() and calls == int(bomb.read_text()):
        raise ConnectionError("the server is gone")
    return random.random() - 0.5
"""


def fragile_config(folder: Path, name: str, **sampler: object) -> Config:
    recipe = small_recipe(output_dir=str(folder), name=name, steps=4, save_every=0, eval_every=2)
    recipe["reward"] |= {"kind": "fragile:judge", "calls": {"retries": 0}}
    recipe["sampler"] |= sampler
    return parse_config(recipe)


@pytest.fixture
def fragile(modules: Path) -> tuple[Path, bytes, list[int]]:
    """The plug-in's folder, the metrics of a run it does not fail, and the call with which each step begins."""
    import importlib

    (modules / "fragile.py").write_text(FRAGILE)
    (modules / "bomb").write_text("-1")
    module = importlib.reload(importlib.import_module("fragile"))
    begins: list[int] = []

    class Watch(Progress):
        def step(self, *_: object) -> None:
            begins.append(module.calls + 1)

    folder = train(fragile_config(modules, "whole"), Watch())
    module.calls = 0
    return modules, (folder / "metrics.jsonl").read_bytes(), begins


@pytest.mark.parametrize(("call", "saved"), [("sampling of step 3", 2), ("evaluation of step 2", 2), ("step 1", None)])
def test_a_run_loses_nothing_to_a_plugin_that_fails(
    fragile: tuple[Path, bytes, list[int]], call: str, saved: int | None
) -> None:
    """It used to lose every step since the last checkpoint; here there is none but the one that the failure makes."""
    import fragile as module

    folder, whole, (_, after_two, _, _) = fragile
    heldout = 10 * 2  # problems, samples of each
    first_of_three = after_two + heldout  # step 2 is evaluated before step 3 begins
    number = {"sampling of step 3": first_of_three + 1, "evaluation of step 2": after_two + 3, "step 1": heldout + 2}[
        call
    ]
    (folder / "bomb").write_text(str(number))
    with pytest.raises(RewardError, match="fragile:judge: ConnectionError: the server is gone"):
        train(fragile_config(folder, "broken"), Progress())
    checkpoints = [found.step for found in find_checkpoints(folder / "broken" / CHECKPOINTS)]
    assert checkpoints == ([] if saved is None else [saved])
    (folder / "bomb").unlink()
    module.calls = 0
    resumed = train(fragile_config(folder, "broken"), Progress())
    assert (resumed / "metrics.jsonl").read_bytes() == whole


def test_a_step_that_cannot_be_filled_loses_no_other(fragile: tuple[Path, bytes, list[int]]) -> None:
    folder, *_ = fragile
    config = fragile_config(folder, "stuck", max_rounds=1, on_exhausted="error", initial_acceptance=1.0)
    with pytest.raises(SamplingExhaustedError):
        train(config, Progress())
    done = [line for line in (folder / "stuck" / "metrics.jsonl").read_text().splitlines() if '"kind": "step"' in line]
    saved = [found.step for found in find_checkpoints(folder / "stuck" / CHECKPOINTS)]
    assert saved == ([len(done)] if done else [])


def test_the_command_says_it_in_one_line(modules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(modules, "always", "def judge(p, c): raise OSError('no')")
    recipe = str(write_recipe(modules, steps=1))
    assert main(["train", recipe, "reward.kind=always:judge", "reward.calls.retries=0"]) == 1
    error = capsys.readouterr().err
    assert "dapo: reward always:judge: OSError: no (always.py:3)" in error
    assert "Traceback" not in error
    assert main(["train", recipe, "run.name=good"]) == 0
    assert main(["eval", str(modules / "runs" / "good"), "reward.kind=always:judge", "reward.calls.retries=0"]) == 1
    assert "dapo: reward always:judge: OSError: no" in capsys.readouterr().err


def test_a_plugin_that_cannot_be_imported_is_told(modules: Path) -> None:
    with refused("reward.kind"):
        load_reward(make_config(reward={"kind": "nowhere_at_all:f"}).reward, "nowhere_at_all:f")


def test_a_deadline_holds_beside_the_main_thread_too(modules: Path) -> None:
    """Where `rollout.max_staleness` has answers scored, and no alarm comes."""
    body = """
        def judge(prompt, completion):
            time.sleep(float(completion.text))
            return 1.0
    """
    judge = load(modules, "beside", body, plugin_deadline=0.2)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        assert beside.submit(judge, PROMPT, make_completion(text="0.0")).result().correct
        with pytest.raises(RewardError, match=r"reward\.plugin_deadline"):
            beside.submit(judge, PROMPT, make_completion(text="30.0")).result()
    assert time.monotonic() - began < 5
