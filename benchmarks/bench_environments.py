"""What several turns cost, as a page of results.

    python -m benchmarks.bench_environments --engine hf --model models/smollm2-135m --out benchmarks/results/NAME.md

The same number of tokens per response is sampled in one turn and in several, between which an environment says a few
words; then again with an environment that takes its time for every call. The sides take turns. Every turn has the same
limit and is answered although it reaches it, so that both sides sample equally long responses.
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
from dapo_runner.config import Config, parse_config
from dapo_runner.environments.environment import Message, StepResult
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.model import load_tokenizer
from dapo_runner.rollout.engine import BatchCall, open_engine
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.types import DEFAULT_OPTIONS, Prompt, SamplingParams

QUESTION = "Tell me a story about a lighthouse, a storm and a very small boat."


class Listener:
    """Asks for more. ``seconds``: that each call takes."""

    tools = ()
    seconds = 0.0

    def reset(self, row: Mapping[str, Any]) -> StepResult:
        time.sleep(self.seconds)
        return StepResult()

    def step(self, text: str) -> StepResult:
        time.sleep(self.seconds)
        return StepResult((Message("user", "And what happened then?"),))

    def finish(self) -> float | None:
        return 1.0


class FixedTurns(EpisodeRunner):
    """Takes a turn that reaches its limit for one that has ended."""

    def _hear_policy(self, place: int, episode: Any, completion: Any, calls: Any) -> None:
        super()._hear_policy(place, episode, replace(completion, finish_reason="stop"), calls)


def config_of(options: argparse.Namespace) -> Config:
    return parse_config(
        {
            "run": {"threads": options.threads},
            "model": {"path": options.model, "dtype": options.dtype},
            "data": {"format": "arithmetic"},
            "env": {
                "kind": "benchmarks.bench_environments:Listener",
                "max_turns": options.turns,
                "max_turn_tokens": options.tokens,
            },
            "rollout": {
                "engine": options.engine,
                "vllm": {"kv_cache_gib": 1.0},
                "max_prompt_tokens": 64,
                "max_response_tokens": options.turns * (options.tokens + 32),
                "max_batch_sequences": options.episodes,
            },
            "reward": {"overlong": {"soft_punishment": False}},
            "optimizer": {"token_budget": 8192},
        }
    )


def measure(options: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
    """Return tokens of the policy and seconds of each round, by side."""
    config = config_of(options)
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model, config.model)
    engine = open_engine(config, options.model, torch.device("cpu"), SINGLE_PROCESS)
    runner = FixedTurns(config, tokenizer)
    messages = (("user", QUESTION),)
    turns = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    prompts = [
        Prompt(str(n), tuple(tokenizer(text)["input_ids"]), text, "", messages=messages)
        for n in range(options.episodes)
    ]
    opened = [replace(one, token_ids=(*one.token_ids, *runner.template.open_episode(messages, ()))) for one in prompts]

    def one_turn() -> int:
        sampling = SamplingParams(max_tokens=options.turns * options.tokens)
        return sum(found.n_sampled for (found,) in engine.generate(opened, sampling))

    def several(seconds: float) -> Callable[[], int]:
        def run() -> int:
            Listener.seconds = seconds
            sampling = [
                SamplingParams(max_tokens=config.rollout.max_response_tokens, index=n) for n in range(len(prompts))
            ]
            return sum(found.n_sampled for (found,) in runner(engine, prompts, sampling, DEFAULT_OPTIONS))

        return run

    def without_cache() -> int:
        engine.open_call = lambda *_: BatchCall(engine.generate)  # type: ignore[method-assign]
        try:
            return several(0.0)()
        finally:
            del engine.open_call

    sides = {"one turn": one_turn, f"{options.turns} turns": several(0.0)}
    sides[f"{options.turns} turns, {1000 * options.seconds:g} ms a call"] = several(options.seconds)
    if options.engine == "hf":
        sides[f"{options.turns} turns, earlier ones computed again"] = without_cache
    found: dict[str, list[tuple[int, float]]] = {side: [] for side in sides}
    for _ in range(options.rounds + 1):
        for side, run in sides.items():
            start = time.perf_counter()
            found[side].append((run(), time.perf_counter() - start))
    engine.close()
    return {side: rounds[1:] for side, rounds in found.items()}


def page(found: dict[str, list[tuple[int, float]]], options: argparse.Namespace) -> str:
    here = machine.describe()
    rates = {side: statistics.median(n / seconds for n, seconds in rounds) for side, rounds in found.items()}
    base = rates["one turn"]
    seconds = {side: statistics.median(seconds for _, seconds in rounds) for side, rounds in found.items()}
    rows = [
        f"| {side} | {found[side][0][0]} | {seconds[side]:.2f} | {rate:.0f} | {rate / base:.2f} |"
        for side, rate in rates.items()
    ]
    return f"""# Several turns against one: {options.engine}

Command: `{machine.command("python", "-m", "benchmarks.bench_environments")}`.
{options.episodes} episodes of {options.turns} turns of {options.tokens} tokens, {Path(options.model).name},
{options.dtype}, {options.threads} threads. Medians of {options.rounds} rounds: the sides take turns, and a first round
of each is left out. Tokens are those that the policy sampled.
{machine.headline(here)}; commit {here["commit"]}; load before: {here["load_average"][0]}.

| side | tokens | seconds | tokens/s | ÷ one turn |
|---|---:|---:|---:|---:|
{chr(10).join(rows)}
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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = page(measure(options), options)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
