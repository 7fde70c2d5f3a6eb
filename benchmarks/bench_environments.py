"""What several turns and a slow environment cost, as a page of results.

    python -m benchmarks.bench_environments --engine hf --model models/smollm2-135m --out benchmarks/results/NAME.md

The same number of tokens per response is sampled in one turn and in several, between which an environment says a few
words. With several turns a whole step is timed, sampling and training, also over an environment that takes its time for
every call. The sides take turns. Every turn has the same limit and is answered although it reaches it, and with `hf` no
token ends it before, so that all sides sample equally many tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import machine
from benchmarks.bench_ranks import recipe
from benchmarks.report import markdown_table
from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, parse
from dapo_runner.engines.engine import BatchCall, Groups, engine_class
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import load_policy, load_tokenizer
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.types import Group, Prompt, Sample, SamplingParams, Verdict, make_requests

QUESTION = "Tell me a story about a lighthouse, a storm and a very small boat."
EPISODES, GROUP, THREADS = 64, 8, 1  # a group has the episodes of a prompt
TURNS, TOKENS = 4, 24  # tokens of a turn
CALL_S = 0.05  # that a call of the slow environment takes


class Listener:
    """Asks for more. ``seconds``: that each call takes."""

    seconds = 0.0

    def reset(self, row: Mapping[str, Any]) -> None:
        time.sleep(self.seconds)

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return "And what happened then?", 0.0, False


class Bench:
    """An engine, a policy, and prompts of which each is sampled ``GROUP`` times."""

    def __init__(self, model: str, engine: str) -> None:
        torch.set_num_threads(THREADS)
        lengths = {"max_prompt_tokens": 64, "max_response_tokens": TURNS * (TOKENS + 64)}
        sizes = {"group_size": GROUP, "max_batch_sequences": EPISODES, "vllm": {"kv_cache_gib": 1.0}}
        raw = recipe(model, ".", EPISODES // GROUP, 0, engine=engine, **lengths, **sizes)
        raw["run"]["threads"] = THREADS
        raw["optimizer"] |= {"token_budget": 8192, "mini_batch_size": EPISODES}
        kind = "benchmarks.bench_environments:Listener"
        self.config = parse(raw | {"env": {"kind": kind, "max_turns": TURNS, "max_turn_tokens": TOKENS}}, Config)
        device = torch.device("cpu")
        tokenizer = load_tokenizer(model, self.config.model)
        self.engine = engine_class(self.config).load(model, self.config, device, SINGLE_PROCESS, print)
        if engine == "hf":
            self.engine.stop_ids = []  # type: ignore[attr-defined]
        complete = self.engine._completions  # type: ignore[attr-defined]
        self.engine._completions = lambda *found: [  # type: ignore[attr-defined]
            replace(one, finish_reason="stop") for one in complete(*found)
        ]
        self.runner = EpisodeRunner(self.config, tokenizer)
        self.learner = Learner(load_policy(model, self.config.model, device), self.config)
        messages, text = (("user", QUESTION),), QUESTION
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False)
            text = rendered[: rendered.index(QUESTION)] + QUESTION
        token_ids = tuple(tokenizer(text)["input_ids"])
        self.prompts = [Prompt(str(n), token_ids, text, "", messages=messages) for n in range(EPISODES // GROUP)]
        opened = (*token_ids, *self.runner.template.open_episode(messages, ""))
        self.opened = [replace(one, token_ids=opened) for one in self.prompts]

    def one_turn(self) -> Groups:
        return self.engine.generate(make_requests(self.opened, SamplingParams(n=GROUP, max_tokens=TURNS * TOKENS)))

    def several(self, seconds: float = 0.0) -> Groups:
        Listener.seconds = seconds
        sampling = SamplingParams(n=GROUP, max_tokens=self.config.rollout.max_response_tokens)
        return self.runner(self.engine, make_requests(self.prompts, sampling), None)

    def without_cache(self) -> Groups:
        self.engine.open_call = lambda *_: BatchCall(self.engine.generate)  # type: ignore[method-assign]
        try:
            return self.several()
        finally:
            del self.engine.open_call

    def train(self, found: Groups) -> None:
        groups = [
            Group(prompt, tuple(Sample(one, Verdict(False), float(n % 2)) for n, one in enumerate(completions)))
            for prompt, completions in zip(self.prompts, found, strict=True)
        ]
        for mini in self.learner.prepare(make_sequences(groups, self.config.advantage)):
            self.learner.update(mini, 1)
        self.engine.sync(self.learner.policy)


# Tokens of the policy and of the environment, seconds of sampling, seconds of the step.
Rounds = list[tuple[int, int, float, float]]


def measure(options: argparse.Namespace) -> dict[str, Rounds]:
    """Return the rounds of each side. With one turn, and where turns are computed again, no step is trained."""
    bench, turns = Bench(options.model, options.engine), f"{TURNS} turns"
    sides: dict[str, Callable[[], Groups]] = {
        "one turn": bench.one_turn,
        turns: bench.several,
        f"{turns}, {1000 * CALL_S:g} ms a call": lambda: bench.several(CALL_S),
    }
    trained = set(list(sides)[1:])
    if options.engine == "hf":
        sides[f"{turns}, earlier ones computed again"] = bench.without_cache
    found: dict[str, Rounds] = {side: [] for side in sides}
    for _ in range(options.rounds + 1):
        for side, run in sides.items():
            start = time.perf_counter()
            groups = run()
            sampled = time.perf_counter() - start
            if side in trained:
                bench.train(groups)
            tokens = sum(one.n_sampled for group in groups for one in group)
            read = sum(one.length for group in groups for one in group) - tokens
            found[side].append((tokens, read, sampled, time.perf_counter() - start))
    bench.engine.close()
    return {side: rounds[1:] for side, rounds in found.items()}


def page(found: dict[str, Rounds], options: argparse.Namespace, here: dict[str, Any]) -> str:
    medians = {side: [median(column) for column in zip(*rounds, strict=True)] for side, rounds in found.items()}
    rates = {side: tokens / seconds for side, (tokens, _, seconds, _) in medians.items()}
    rows = [
        [side, f"{tokens:.0f}", f"{read:.0f}", f"{seconds:.2f}", f"{rates[side]:.0f}", f"{rates[side] / first:.2f}"]
        for first in (rates["one turn"],)
        for side, (tokens, read, seconds, _) in medians.items()
    ]
    columns = ["side", "tokens", "of the environment", "seconds of sampling", "tokens/s", "÷ one turn"]
    fast, slow = (step for _, _, _, step in list(medians.values())[1:3])
    return f"""# Several turns against one: {options.engine}

{EPISODES} episodes of {TURNS} turns of {TOKENS} tokens, {Path(options.model).name}, bfloat16, {THREADS} threads.
Medians of {options.rounds} rounds: the sides take turns, and a first round of each is left out. Tokens are those that
the policy sampled; those of the environment are read, not sampled.

{machine.facts(here)}

{markdown_table(columns, rows)}

A whole step, sampling and training: {fast:.2f} s with an environment that answers at once, and {slow:.2f} s with one
that takes {1000 * CALL_S:g} ms for each call: {100 * (slow / fast - 1):+.1f} %.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = machine.describe()
    text = page(measure(options), options, here)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    from benchmarks import bench_environments  # the module whose Listener the engine's episodes are made of

    bench_environments.main()
