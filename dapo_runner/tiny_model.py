"""Make a small model on the spot: a two-layer transformer with its tokenizer, after a short supervised warm-up.

The warm-up trains on worked examples and stops while most problems are still solved incorrectly: it teaches the format
of an answer and the beginnings of arithmetic. The evaluations before and after training, on held-out problems, show
what reinforcement learning adds.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dapo_runner.config import Config, ConfigError, TinyModelConfig
from dapo_runner.data.arithmetic import ArithmeticProblem, split_problems
from dapo_runner.data.dataset import apply_template
from dapo_runner.engines.hf import HFEngine
from dapo_runner.errors import describe_error
from dapo_runner.files import share
from dapo_runner.plugins import import_function
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.rollout.worker import RolloutWorker
from dapo_runner.types import Prompt, make_requests

SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = ("Answer: ", *"0123456789", *"+-*=,;:?() \n")
TOOL_WORDS = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
KNOWN = re.compile("|".join(map(re.escape, (*TOOL_WORDS, *WORDS))))
TURNS = "model.tiny.warmup.turns"
CHECK_EVERY = 10  # warm-up steps between measurements of the share solved
CHECK_PROBLEMS = 256
LR_WARMUP = 20  # steps


def make_tokenizer(words: tuple[str, ...] = WORDS) -> Any:
    """Return a tokenizer whose tokens are ``words``. Text outside the longer words is split into characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *words))}
    phrases = "|".join(re.escape(word) for word in words if len(word) > 1)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{phrases}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tiny_tokenizer(config: Config) -> Any:
    return make_tokenizer((*WORDS, *TOOL_WORDS) if config.env is not None else WORDS)


def make_model(config: TinyModelConfig, tokenizer: Any, max_positions: int) -> Any:
    """Return a Llama of the configured size with random weights, from torch's global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=max_positions,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(settings)


def worked_solution(problem: ArithmeticProblem) -> str:
    """Return the solution column by column, each sum with its carry last, then the answer line.

    47+85 → ``7+5+0=12``, ``4+8+1=13``, ``Answer: 132``. Other operators than + get only the answer line.
    """
    answer = f"Answer: {problem.answer}"
    if problem.operator != "+":
        return answer
    lines, carry = [], 0
    for column in zip_longest(*(reversed(str(operand)) for operand in problem.operands), fillvalue="0"):
        total = sum(map(int, column)) + carry
        lines.append(f"{'+'.join(column)}+{carry}={total:02d}")
        carry = total // 10
    return "\n".join([*lines, answer])


def with_repeats(solution: str, repeat: float, rng: random.Random) -> str:
    """Repeat each line with probability ``repeat``, any number of times, so that some responses exceed the limit."""
    lines: list[str] = []
    for line in solution.split("\n"):
        lines.append(line)
        while rng.random() < repeat:
            lines.append(line)
    return "\n".join(lines)


def check_tiny(config: Config) -> None:
    """Raise ConfigError for settings that the tiny model does not support."""
    if config.data.format != "arithmetic":
        raise ConfigError(f"model.tiny: requires data.format=arithmetic, got {config.data.format}. Or set model.path.")
    if config.env is not None and not all(tool.endswith(":calculator") for tool in config.env.tools):
        raise ConfigError(f"env.tools: expected a tool named calculator with model.tiny, got {config.env.tools}")
    _check_characters("data.template", apply_template(config.data.prompt_template, ""))
    assert config.model.tiny is not None
    warmup, size = config.model.tiny.warmup, config.data.arithmetic.train_size
    if warmup.stop_at is not None and warmup.examples >= size:
        few = f"expected fewer warm-up examples than data.arithmetic.train_size={size}, got {warmup.examples}"
        raise ConfigError(f"model.tiny.warmup.stop_at: {few}. It is measured on the remaining problems.")


MADE_HERE = set[Path]()  # models that this process has made


def ensure_tiny_model(config: Config, folder: Path, report: Callable[[str], None]) -> Path:
    """Return the folder of a run's tiny model. Make the model and warm it up if it does not exist.

    ``report`` gets progress lines. ``check_tiny`` must have accepted the configuration. Raises ConfigError if the
    function of the warm-up's turns fails.
    """
    assert config.model.tiny is not None
    if folder.exists():
        if folder not in MADE_HERE and (turns := config.model.tiny.warmup.turns) is not None:
            report(f"{folder} was warmed up on turns of {turns}. If you changed them, set another run.name.")
        return folder
    torch.manual_seed(config.run.seed)
    tokenizer = tiny_tokenizer(config)
    model = make_model(config.model.tiny, tokenizer, config.longest_sequence)
    warm_up(model, tokenizer, config, report)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    share(unfinished / "model.safetensors")
    unfinished.rename(folder)
    MADE_HERE.add(folder)
    return folder


def warm_up(model: Any, tokenizer: Any, config: Config, report: Callable[[str], None]) -> None:
    """Train on worked examples for a fixed number of steps, or until ``stop_at`` of unseen problems are correct."""
    assert config.model.tiny is not None
    settings, rng = config.model.tiny.warmup, random.Random(config.run.seed)
    problems, _ = split_problems(config.data.arithmetic, config.data.eval_size)
    shown = random.Random(f"{config.run.seed}:repeats")
    examples = [_encode(problem, tokenizer, config, shown) for problem in problems[: settings.examples]]
    unseen = problems[settings.examples :][:CHECK_PROBLEMS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    model.train()
    for step in range(1, settings.steps + 1):
        batch = rng.sample(examples, min(settings.batch_size, len(examples)))
        optimizer.param_groups[0]["lr"] = settings.lr * min(1.0, step / LR_WARMUP)
        ids = pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = pad_sequence([labels for _, labels in batch], batch_first=True, padding_value=-100)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY and step < settings.steps:
            continue
        progress = f"warm-up step {step}: loss {loss.item():.3f}"
        if not unseen:
            report(progress)
            continue
        solved, truncated = shares_solved_and_truncated(model, tokenizer, unseen, config)
        report(f"{progress}, {solved:.0%} of unseen problems solved, {truncated:.0%} of the answers truncated")
        if settings.stop_at is not None and solved >= settings.stop_at:
            break
    model.eval()


def shares_solved_and_truncated(
    model: Any, tokenizer: Any, problems: list[ArithmeticProblem], config: Config
) -> tuple[float, float]:
    """Return the shares solved and truncated, with one sample per problem and the sampling settings of rollouts."""
    texts = [apply_template(config.data.prompt_template, problem.question) for problem in problems]
    prompts = [
        Prompt(problem.question, tuple(tokenizer(text)["input_ids"]), text, problem.answer)
        for problem, text in zip(problems, texts, strict=True)
    ]
    engine = HFEngine(model, tokenizer, config.rollout.max_batch_sequences)
    sampling = config.rollout.params(max_tokens=config.rollout.max_response_tokens, seed=config.run.seed)
    episodes = EpisodeRunner(config, tokenizer) if config.env else None
    worker = RolloutWorker(engine, Scorer(config, shaped=False), tokenizer, episodes=episodes)
    groups = worker.generate(make_requests(prompts, sampling))
    truncated = sum(group.n_truncated for group in groups) / len(groups)
    return sum(group.n_correct for group in groups) / len(groups), truncated


def _encode(problem: ArithmeticProblem, tokenizer: Any, config: Config, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Return the tokens of a worked example and their labels, -100 for those that the policy does not write."""
    assert config.model.tiny is not None
    warmup = config.model.tiny.warmup
    prompt = tokenizer(apply_template(config.data.prompt_template, problem.question))["input_ids"]
    if warmup.turns is None:
        turns = [with_repeats(worked_solution(problem), warmup.repeat, rng)]
    else:
        turns = turns_of_example(warmup.turns, problem, rng)
    response, labels = list[int](), [-100] * len(prompt)
    for number, text in enumerate(turns):
        is_policy = number % 2 == 0
        tokens = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if is_policy else [])]
        response += tokens
        labels += tokens if is_policy else [-100] * len(tokens)
    return torch.tensor(prompt + response), torch.tensor(labels)


def turns_of_example(use: str, problem: ArithmeticProblem, rng: random.Random) -> list[str]:
    """Return the turns that the function ``use`` gives for a problem. Raises ConfigError."""
    call, function = f"{TURNS}: {use}({problem.question!r}, {problem.answer!r}, rng)", import_function(TURNS, use)
    try:
        turns = function(problem.question, problem.answer, rng)
    except Exception as error:
        raise ConfigError(f"{call} raised {describe_error(error)}") from error
    is_list = isinstance(turns, (list, tuple)) and all(isinstance(turn, str) for turn in turns)
    if not is_list or len(turns) % 2 == 0:
        raise ConfigError(f"{call} must return an odd number of texts in a list, got {turns!r:.200}")
    _check_characters(call, "\n".join(turns))
    return list(turns)


def _check_characters(source: str, text: str) -> None:
    if unknown := KNOWN.sub("", text):
        known = f"expected only characters that model.tiny knows, {''.join(WORDS)!r}"
        raise ConfigError(f"{source}: {known}, got {unknown!r} in {text!r:.200}")
