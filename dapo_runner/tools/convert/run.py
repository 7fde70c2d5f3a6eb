"""`dapo convert-answers`: every problem whose answer is no integer is put to a model, and its reply to the rules."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError, ConvertConfig, ModelConfig
from dapo_runner.data.dataset import RECIPE_TEMPLATE, render
from dapo_runner.data.reading import Problem, read_problems
from dapo_runner.policy.model import load_model, load_tokenizer, resolve_device
from dapo_runner.preflight.needs import check_model
from dapo_runner.rewards.alarm import in_thread
from dapo_runner.rewards.calls import PAUSE
from dapo_runner.rewards.endpoint import EndpointError
from dapo_runner.rewards.judge import endpoint_of
from dapo_runner.rewards.math_rule import math_judge
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.tools.convert.journal import Journal
from dapo_runner.tools.convert.reply import as_integer, read_reply, request
from dapo_runner.tools.convert.rules import RejectedError, Same, check
from dapo_runner.types import Prompt, SamplingParams

WORKERS, DEADLINE = 2, 5.0  # processes that evaluate, and the seconds that each has for one comparison
TOLD_EVERY = 10.0  # seconds
# What may be otherwise when the same command goes on.
MAY_CHANGE = ("limit", "device", "url", "key_env", "batch", "concurrency", "retries", "timeout")

Answers = Iterator[tuple[str, str]]


def convert_answers(source: Path, out: Path, config: ConvertConfig, report: Callable[[str], None]) -> Counter[str]:
    """Write ``out`` and, beside it, what was rejected; a journal beside them holds what is settled, and the same call
    goes on from it. ``report`` gets a line now and then. Returns how many were kept, and rejected for what.

    Raises ConfigError, and EndpointError when the model does not answer.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("convert-answers: needs the package math-verify; pip install 'dapo-kernels[math]'")
    if out.suffix != ".jsonl":
        raise ConfigError(f"OUT: expected a .jsonl file, got {out}")
    if config.engine == "hf":
        check_model("model", config.model)
    rows = read_problems(source, config.format, columns=config.columns, subset=config.subset, split=config.split)
    problems = {_key_of(problem): problem for problem in islice(rows, config.limit)}
    same = partial(_same, math_judge(WORKERS, DEADLINE))
    begun_with = config.model_dump(mode="json", exclude=set(MAY_CHANGE))
    with Journal(out, begun_with) as journal:
        open_ones = {key: problem for key, problem in problems.items() if key not in journal.settled}
        asked, told = {}, time.monotonic()
        for key, problem in open_ones.items():
            if as_integer(problem.answer) is None:
                asked[key] = request(bare_question(problem), problem.answer)
            else:
                journal.add(key, _row(problem, problem.question, problem.answer, {"rule": "integer"}), None)
        for key, said in _answers(config, asked):
            journal.add(key, *settle(problems[key], said, config, same))
            if time.monotonic() - told > TOLD_EVERY:
                report(f"{sum(name in journal.settled for name in problems)} of {len(problems)} problems")
                told = time.monotonic()
        counts = Counter(journal.settled[key]["rejected"] or "kept" for key in problems)
        journal.finish(problems)
    return counts


def settle(problem: Problem, said: str, config: ConvertConfig, same: Same) -> tuple[dict[str, Any], str | None]:
    """A row and None, or the row of what is not kept and why."""
    question = bare_question(problem)
    evidence: dict[str, Any] = {"problem": question, "answer": problem.answer, "model": config.model, "said": said}
    try:
        reply = read_reply(said)
        checked = check(reply, question, problem.answer, same)
        if config.unchecked == "reject" and None in checked.values():
            raise RejectedError("the rules cannot evaluate it")
    except (RejectedError, ValueError) as error:
        return _row(problem, problem.question, problem.answer, {**evidence, "rejected": str(error)}), str(error)
    evidence |= {"form": reply.form, "values": reply.values, "quantity": reply.quantity, "agrees": checked}
    return _row(problem, reply.question, str(reply.integer), {"rule": "rewritten", **evidence}), None


def bare_question(problem: Problem) -> str:
    """Without the recipe's instruction around it."""
    before, _, after = RECIPE_TEMPLATE.partition("{question}")
    return problem.question.removeprefix(before).removesuffix(after).strip()


def _row(problem: Problem, question: str, answer: str, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """In the schema of DAPO's data, which `data.path` takes as it is."""
    turns = (*problem.context, ("user", question))
    return {
        "data_source": problem.source,
        "prompt": [{"role": role, "content": content} for role, content in turns],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "conversion": dict(evidence),
    }


def _key_of(problem: Problem) -> str:
    return hashlib.sha256(f"{problem.key}\0{problem.answer}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _same(judge: Callable[[Sequence[str], str], Sequence[Any]], expression: str, answer: str) -> bool | None:
    (verdict,) = judge([f"\\boxed{{{expression}}}"], answer.strip().strip("$"))
    return verdict.correct if verdict.rule == "math-verify" else None


def _answers(config: ConvertConfig, asked: Mapping[str, list[dict[str, str]]]) -> Answers:
    """Keys with what the model said, in the order in which it does. Raises EndpointError."""
    if not asked:
        return iter(())
    return _from_endpoint(config, asked) if config.engine == "endpoint" else _from_model(config, asked)


def _from_endpoint(config: ConvertConfig, asked: Mapping[str, list[dict[str, str]]]) -> Answers:
    endpoint = endpoint_of(config, config.timeout)

    def ask(messages: list[dict[str, str]]) -> str:
        for attempt in range(config.retries + 1):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                return endpoint.chat(
                    messages, max_tokens=config.max_tokens, temperature=config.temperature, seed=0
                ).text
            except EndpointError as error:
                failure = error
        raise failure

    under_way: dict[Future[Any], str] = {}
    waiting = iter(asked.items())
    while True:
        for key, messages in islice(waiting, config.concurrency - len(under_way)):
            under_way[in_thread(partial(ask, messages))] = key
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            yield under_way.pop(future), future.result()


def _from_model(config: ConvertConfig, asked: Mapping[str, list[dict[str, str]]]) -> Answers:
    settings, device = ModelConfig(path=config.model, dtype=config.dtype), resolve_device(config.device, "device")
    tokenizer = load_tokenizer(config.model, settings)
    chat = bool(tokenizer.chat_template)
    engine = HFEngine(load_model(config.model, settings, device, "sdpa"), tokenizer, config.batch)
    keys = list(asked)
    for start in range(0, len(keys), config.batch):
        prompts, each = [], []
        for key in keys[start : start + config.batch]:
            turns = [(message["role"], message["content"]) for message in asked[key]]
            text = render(turns, tokenizer, chat, **config.chat_template_kwargs)
            ids = tokenizer([text], add_special_tokens=not chat)["input_ids"][0]
            prompts.append(Prompt(key, tuple(ids), text, answer=""))
            # A seed of its own: what is said of a problem does not depend on which were settled before.
            seed = int(key, 16) >> 1
            each.append(
                SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens, seed=seed, index=0)
            )
        for prompt, (completion,) in zip(prompts, engine.generate(prompts, each), strict=True):
            yield prompt.id, completion.text
