"""`dapo convert-answers`: every problem whose answer is no integer is put to a model, and its reply to the rules."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from dapo_runner.config import ConfigError, ConvertConfig, ModelConfig
from dapo_runner.data.dataset import RECIPE_TEMPLATE, render
from dapo_runner.data.reading import Problem, read_problems
from dapo_runner.files import append_jsonl, atomic_write, drop_incomplete_line, lock_file, read_jsonl, to_jsonl
from dapo_runner.http import HTTPError
from dapo_runner.policy.model import load_model, load_tokenizer, resolve_device
from dapo_runner.preflight.needs import check_model
from dapo_runner.rewards.calls import PAUSE
from dapo_runner.rewards.deadline import in_thread
from dapo_runner.rewards.endpoint import chat
from dapo_runner.rewards.worker_rules import MathReward, open_math
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.tools.convert.rules import IsSame, RejectedError, as_integer, check, read_reply, request
from dapo_runner.types import Prompt, SamplingParams

WORKERS, DEADLINE = 2, 5.0  # processes that evaluate, and the seconds that each has for one comparison
TOLD_EVERY = 10.0  # seconds
# What may be otherwise when the same command goes on.
MAY_CHANGE = ("limit", "url", "key_env", "concurrency")
RETRIES, TIMEOUT = 2, 600.0  # of a failed request; seconds without a sign of the server
BATCH = 32  # problems that a model of this process decodes side by side

Answers = Iterator[tuple[str, str]]
Settled = tuple[str, dict[str, Any], str | None]


def beside(out: Path, what: str) -> Path:
    """`sums.jsonl` → `sums.rejected.jsonl`."""
    return out.with_name(f"{out.stem}.{what}{out.suffix}")


def convert_answers(source: Path, out: Path, config: ConvertConfig, report: Callable[[str], None]) -> Counter[str]:
    """Write ``out`` and, beside it, what was rejected. A journal holds what is settled, and the same call resumes
    from it. ``report`` gets a line now and then. Returns how many were kept, and rejected for what.

    Raises ConfigError, and HTTPError when the model does not answer.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("convert-answers: needs the package math-verify; pip install 'dapo-kernels[math]'")
    if out.suffix != ".jsonl":
        raise ConfigError(f"OUT: expected a .jsonl file, got {out}")
    if config.url is None:
        check_model("model", config.model)
    rows = read_problems(source, config.format, columns=config.columns, subset=config.subset, split=config.split)
    problems = {_key_of(problem): problem for problem in islice(rows, config.limit)}
    journal = beside(out, "journal")
    with _locked(out, journal):
        settled = _read_journal(journal, config.model_dump(mode="json", exclude=set(MAY_CHANGE)))
        told = time.monotonic()
        for key, row, rejected in _settle_all(problems, settled, config):
            settled[key] = {"key": key, "rejected": rejected, "row": row}
            append_jsonl(journal, [settled[key]])
            if time.monotonic() - told > TOLD_EVERY:
                report(f"{sum(name in settled for name in problems)} of {len(problems)} problems")
                told = time.monotonic()
        lines = [settled[key] for key in problems]
        for path, is_kept in ((beside(out, "rejected"), False), (out, True)):
            content = to_jsonl(line["row"] for line in lines if (line["rejected"] is None) == is_kept)
            if path.exists() and path.read_bytes() != content:
                raise ConfigError(f"{path}: expected nothing there, it is not written over")
            atomic_write(path, content, sync=True)
        journal.unlink()
    return Counter(line["rejected"] or "kept" for line in lines)


def _locked(out: Path, journal: Path) -> BinaryIO:
    """Lock the journal. Raises ConfigError where another process has it, or ``out`` exists without one."""
    for path in (out, beside(out, "rejected")):
        if path.exists() and not journal.exists():
            raise ConfigError(f"{path}: expected nothing there, it is not written over")
    try:
        return lock_file(journal)
    except BlockingIOError as error:
        raise ConfigError(f"{journal}: another process works on it") from error
    except OSError as error:
        raise ConfigError(f"{out}: expected a folder that can be written to: {error}") from error


def _read_journal(journal: Path, begun_with: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is settled, by key. The first line has the settings that it was begun with. Raises ConfigError."""
    drop_incomplete_line(journal)
    lines = read_jsonl(journal)
    if not lines:
        append_jsonl(journal, [begun_with])
        return {}
    first, *rest = lines
    if changed := sorted(key for key in first.keys() | begun_with.keys() if first.get(key) != begun_with.get(key)):
        raise ConfigError(f"{journal} was begun with other settings ({', '.join(changed)}). Use those, or another OUT.")
    return {line["key"]: line for line in rest}


def _settle_all(problems: Mapping[str, Problem], settled: Collection[str], config: ConvertConfig) -> Iterator[Settled]:
    """Yield key, row and reason of rejection of each problem that is not settled: integers first."""
    asked, is_same = {}, partial(_same, open_math(WORKERS, DEADLINE))
    for key, problem in [(key, problem) for key, problem in problems.items() if key not in settled]:
        if as_integer(problem.answer) is None:
            asked[key] = request(bare_question(problem), problem.answer)
        else:
            yield key, _row(problem, problem.question, problem.answer, {"rule": "integer"}), None
    for key, said in _answers(config, asked):
        yield key, *settle(problems[key], said, config, is_same)


def settle(problem: Problem, said: str, config: ConvertConfig, is_same: IsSame) -> tuple[dict[str, Any], str | None]:
    """Return a row and None, or the row of what is not kept and why."""
    question = bare_question(problem)
    evidence: dict[str, Any] = {"problem": question, "answer": problem.answer, "model": config.model, "said": said}
    try:
        reply = read_reply(said)
        checked = check(reply, question, problem.answer, is_same)
    except RejectedError as error:
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


def _same(reward: MathReward, expression: str, answer: str) -> bool | None:
    (verdict,) = reward.judge_texts([f"\\boxed{{{expression}}}"], [answer.strip().strip("$")])
    return verdict.correct if verdict.rule == "math-verify" else None


def _answers(config: ConvertConfig, asked: Mapping[str, list[dict[str, str]]]) -> Answers:
    """Keys with what the model said, in the order in which it does. Raises HTTPError."""
    if not asked:
        return iter(())
    return _from_endpoint(config, asked) if config.url is not None else _from_model(config, asked)


def _from_endpoint(config: ConvertConfig, asked: Mapping[str, list[dict[str, str]]]) -> Answers:
    fields: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": 0, "seed": 0}
    if config.chat_template_kwargs:
        fields["chat_template_kwargs"] = config.chat_template_kwargs

    def ask(messages: list[dict[str, str]]) -> str:
        for attempt in range(RETRIES + 1):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                return chat(config, messages, TIMEOUT, **fields).text
            except HTTPError as error:
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
    device = resolve_device("auto")
    settings = ModelConfig(path=config.model, dtype="float32" if device.type == "cpu" else "bfloat16")
    tokenizer = load_tokenizer(config.model, settings)
    chat = bool(tokenizer.chat_template)
    engine = HFEngine(load_model(config.model, settings, device, "sdpa"), tokenizer, BATCH)
    keys = list(asked)
    for start in range(0, len(keys), BATCH):
        prompts, each = [], []
        for key in keys[start : start + BATCH]:
            turns = [(message["role"], message["content"]) for message in asked[key]]
            text = render(turns, tokenizer, chat, **config.chat_template_kwargs)
            ids = tokenizer([text], add_special_tokens=not chat)["input_ids"][0]
            prompts.append(Prompt(key, tuple(ids), text, answer=""))
            # A seed of its own: what is said of a problem does not depend on which were settled before.
            seed = int(key, 16) >> 1
            each.append(SamplingParams(temperature=0.0, max_tokens=config.max_tokens, seed=seed, index=0))
        for prompt, (completion,) in zip(prompts, engine.generate(prompts, each), strict=True):
            yield prompt.id, completion.text
