"""What several turns and a slow environment cost, as a page of results.

    python -m benchmarks.bench_environments --engine hf --model models/smollm2-135m --out benchmarks/results/NAME.md

The same number of tokens per response is sampled in one turn and in several, between which an environment says a few
words. With several turns a whole step is timed, sampling and training, also over an environment that takes its time for
every call. The sides take turns. Every turn has the same limit and is answered although it reaches it, and with `hf` no
token ends it before, so that all sides sample equally many tokens. CPU seconds are those of all threads of the process:
with one thread they are the time on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, parse_config
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import load_policy, load_tokenizer
from dapo_runner.rollout.engine import BatchCall, Groups, engine_class
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.types import DEFAULT_OPTIONS, Group, Prompt, Sample, SamplingParams, Verdict, make_requests

QUESTION = "Tell me a story about a lighthouse, a storm and a very small boat."


GROUP = 8  # episodes of a prompt


class Listener:
    """Asks for more. ``seconds``: that each call takes."""

    seconds = 0.0

    def reset(self, row: Mapping[str, Any]) -> None:
        time.sleep(self.seconds)

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return "And what happened then?", 0.0, False


def config_of(options: argparse.Namespace) -> Config:
    return parse_config(
        {
            "run": {"threads": options.threads},
            "model": {"path": options.model, "dtype": options.dtype},
            "data": {"format": "arithmetic"},
            "sampler": {"prompts_per_step": options.episodes // GROUP},
            "env": {
                "kind": "benchmarks.bench_environments:Listener",
                "max_turns": options.turns,
                "max_turn_tokens": options.tokens,
            },
            "rollout": {
                "engine": options.engine,
                "vllm": {"kv_cache_gib": 1.0},
                "max_prompt_tokens": 64,
                "max_response_tokens": options.turns * (options.tokens + 64),
                "group_size": GROUP,
                "max_batch_sequences": options.episodes,
            },
            "reward": {"overlong": {"soft_punishment": False}},
            "optimizer": {"token_budget": 8192, "mini_batch_size": options.episodes},
        }
    )


class Bench:
    """An engine, a policy, and prompts of which each is sampled ``GROUP`` times."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self.options, self.config = options, config_of(options)
        device = torch.device("cpu")
        tokenizer = load_tokenizer(options.model, self.config.model)
        self.engine = engine_class(self.config).load(options.model, self.config, device, SINGLE_PROCESS, print)
        if options.engine == "hf":
            self.engine.stop_ids = []  # type: ignore[attr-defined]
        complete = self.engine._completions  # type: ignore[attr-defined]
        self.engine._completions = lambda *found: [  # type: ignore[attr-defined]
            replace(one, finish_reason="stop") for one in complete(*found)
        ]
        self.runner = EpisodeRunner(self.config, tokenizer)
        self.learner = Learner(load_policy(options.model, self.config.model, device), self.config)
        messages, text, count = (("user", QUESTION),), QUESTION, options.episodes // GROUP
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False)
            text = rendered[: rendered.index(QUESTION)] + QUESTION
        token_ids = tuple(tokenizer(text)["input_ids"])
        self.prompts = [Prompt(str(n), token_ids, text, "", messages=messages) for n in range(count)]
        opened = (*token_ids, *self.runner.template.open_episode(messages, ""))
        self.opened = [replace(one, token_ids=opened) for one in self.prompts]

    def one_turn(self) -> Groups:
        limit = self.options.turns * self.options.tokens
        return self.engine.generate(make_requests(self.opened, SamplingParams(n=GROUP, max_tokens=limit)))

    def several(self, seconds: float = 0.0) -> Groups:
        Listener.seconds = seconds
        sampling = SamplingParams(n=GROUP, max_tokens=self.config.rollout.max_response_tokens)
        return self.runner(self.engine, make_requests(self.prompts, sampling), DEFAULT_OPTIONS)

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


# Tokens of the policy and of the environment, seconds and CPU seconds of sampling, seconds of the step.
Rounds = list[tuple[int, int, float, float, float]]


def measure(options: argparse.Namespace) -> dict[str, Rounds]:
    """Return the rounds of each side. With one turn, and where turns are computed again, no step is trained."""
    bench, turns = Bench(options), f"{options.turns} turns"
    sides: dict[str, Callable[[], Groups]] = {
        "one turn": bench.one_turn,
        turns: bench.several,
        f"{turns}, {1000 * options.seconds:g} ms a call": lambda: bench.several(options.seconds),
    }
    trained = set(list(sides)[1:])
    if options.engine == "hf":
        sides[f"{turns}, earlier ones computed again"] = bench.without_cache
    found: dict[str, Rounds] = {side: [] for side in sides}
    for _ in range(options.rounds + 1):
        for side, run in sides.items():
            start, before = time.perf_counter(), time.process_time()
            groups = run()
            busy, sampled = time.process_time() - before, time.perf_counter() - start
            if side in trained:
                bench.train(groups)
            tokens = sum(one.n_sampled for group in groups for one in group)
            read = sum(one.length for group in groups for one in group) - tokens
            found[side].append((tokens, read, sampled, busy, time.perf_counter() - start))
    bench.engine.close()
    return {side: rounds[1:] for side, rounds in found.items()}


def page(found: dict[str, Rounds], options: argparse.Namespace) -> str:
    median = {
        side: [statistics.median(column) for column in zip(*rounds, strict=True)] for side, rounds in found.items()
    }
    rates = {side: (tokens / seconds, tokens / busy) for side, (tokens, _, seconds, busy, _) in median.items()}
    rows = [
        f"| {side} | {median[side][0]:.0f} | {median[side][1]:.0f} | {median[side][2]:.2f} | {rate:.0f} "
        f"| {rate / rates['one turn'][0]:.2f} | {median[side][3]:.2f} | {busy:.0f} "
        f"| {busy / rates['one turn'][1]:.2f} |"
        for side, (rate, busy) in rates.items()
    ]
    fast, slow = list(found)[1:3]
    ratio = median[slow][4] / median[fast][4] - 1
    return f"""# Several turns against one: {options.engine}

{options.episodes} episodes of {options.turns} turns of {options.tokens} tokens, {Path(options.model).name},
{options.dtype}, {options.threads} threads. Medians of {options.rounds} rounds: the sides take turns, and a first round
of each is left out. Tokens are those that the policy sampled; those of the environment are read, not sampled.
{machine.facts(options.machine, "python", "-m", "benchmarks.bench_environments")}

| side | tokens | of the environment | seconds of sampling | tokens/s | ÷ one turn | CPU s | tokens/CPU s | ÷ one turn |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

A whole step, sampling and training: {median[fast][4]:.2f} s with an environment that answers at once, and
{median[slow][4]:.2f} s with one that takes {1000 * options.seconds:g} ms for each call: {100 * ratio:+.1f} %.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24, help="of a turn")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a call of the slow environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(namespace=argparse.Namespace(machine=machine.describe()))
    text = page(measure(options), options)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    from benchmarks import bench_environments  # the module whose Listener the engine's episodes are made of

    bench_environments.main()
