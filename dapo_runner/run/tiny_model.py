"""A small model made on the spot: a two-layer transformer, a tokenizer of its own, and a short supervised
warm-up.

The warm-up shows worked examples of training problems and stops while most problems still go wrong: it
teaches the form of an answer and a first idea of the sums. What the reinforcement learning adds is told by
the evaluations before and after it, on problems that neither of them has seen.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo_runner.config import Config, ConfigError, TinyModelConfig
from dapo_runner.data.arithmetic import ArithmeticProblem, split_problems
from dapo_runner.data.dataset import apply_template
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.worker import RolloutWorker, make_requests
from dapo_runner.types import Prompt, SamplingParams

SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = ("Answer: ", *"0123456789", *"+-*=,;:?() \n")
CHECK_EVERY = 10  # warm-up steps between two looks at how much is solved
CHECK_PROBLEMS = 256
LR_WARMUP = 20  # steps


def make_tokenizer() -> Any:
    """Every character is a token, and so is ``Answer: ``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"Answer: |[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_model(config: TinyModelConfig, tokenizer: Any, max_positions: int) -> Any:
    """A Llama of the configured size with random weights, from torch's global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=max_positions,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            attn_implementation="sdpa",
        )
    )


def worked_solution(problem: ArithmeticProblem) -> str:
    """Sums column by column from the units, the carry last in each: 47+85 → ``7+5+0=12``, ``4+8+1=13``, the
    answer line.

    Other operators have no steps, only the answer line.
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
    """Each line once more with probability ``repeat``, and again after that: a model that learns from these goes on
    beyond its limit now and then.
    """
    lines: list[str] = []
    for line in solution.split("\n"):
        lines.append(line)
        while rng.random() < repeat:
            lines.append(line)
    return "\n".join(lines)


def check_tiny(config: Config) -> None:
    """Raises ConfigError for settings that the tiny model cannot be made with."""
    if config.data.format != "arithmetic":
        raise ConfigError(
            "model.tiny: expected data.format=arithmetic, which its vocabulary is made for, got "
            f"{config.data.format!r}; set model.path to a real model"
        )
    phrase, *characters = WORDS
    if not set(apply_template(config.data.prompt_template, "").replace(phrase, "")) <= set(characters):
        raise ConfigError(
            f"data.template: expected only the characters the tiny model has, {''.join(WORDS)!r}, "
            f"got {config.data.prompt_template!r}"
        )
    assert config.model.tiny is not None
    examples, size = config.model.tiny.warmup.examples, config.data.arithmetic.train_size
    warmup = config.model.tiny.warmup
    if warmup.stop_at is not None and examples >= size:
        raise ConfigError(
            f"model.tiny.warmup.stop_at: expected fewer examples than data.arithmetic.train_size={size}, to judge on "
            f"the others, got {examples}"
        )


def ensure_tiny_model(config: Config, folder: Path, report: Callable[[str], None]) -> Path:
    """The model folder of a run, made and warmed up if it is not there yet, in transformers' format.

    ``report`` gets a line now and then. The configuration has passed ``check_tiny``.
    """
    if folder.exists():
        return folder
    assert config.model.tiny is not None
    torch.manual_seed(config.run.seed)
    tokenizer = make_tokenizer()
    model = make_model(config.model.tiny, tokenizer, config.longest_sequence)
    warm_up(model, tokenizer, config, report)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def warm_up(model: Any, tokenizer: Any, config: Config, report: Callable[[str], None]) -> None:
    """Next-token training on worked examples: a fixed number of steps, or until ``stop_at`` of unseen
    problems go right.
    """
    assert config.model.tiny is not None
    settings, rng = config.model.tiny.warmup, random.Random(config.run.seed)
    problems, _ = split_problems(config.data.arithmetic, config.data.eval_size)
    shown = random.Random(f"{config.run.seed}:repeats") if settings.repeat else None
    examples = [_encode(problem, tokenizer, config, shown) for problem in problems[: settings.examples]]
    unseen = problems[settings.examples :][:CHECK_PROBLEMS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    model.train()
    for step in range(1, settings.steps + 1):
        batch = rng.sample(examples, min(settings.batch_size, len(examples)))
        optimizer.param_groups[0]["lr"] = settings.lr * min(1.0, step / LR_WARMUP)
        loss = _next_token_loss(model, batch, tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY and step < settings.steps:
            continue
        told = f"warm-up step {step}: loss {loss.item():.3f}"
        if not unseen:
            report(told)
            continue
        solved, cut = solved_and_cut(model, tokenizer, unseen, config)
        report(f"{told}, {solved:.0%} of unseen problems solved, {cut:.0%} of the answers cut")
        if settings.stop_at is not None and solved >= settings.stop_at:
            break
    model.eval()


def solved_and_cut(
    model: Any, tokenizer: Any, problems: list[ArithmeticProblem], config: Config
) -> tuple[float, float]:
    """The shares solved, and cut at the length limit, with one sample each, drawn as the rollouts will be."""
    texts = [apply_template(config.data.prompt_template, problem.question) for problem in problems]
    prompts = [
        Prompt(problem.question, tuple(tokenizer(text)["input_ids"]), text, problem.answer)
        for problem, text in zip(problems, texts, strict=True)
    ]
    engine = HFEngine(model, tokenizer, config.rollout.max_batch_sequences)
    sampling = SamplingParams(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
    )
    worker = RolloutWorker(engine, Scorer(config, shaped=False), tokenizer)
    groups = worker.generate(make_requests(prompts, sampling))
    cut = sum(group.n_truncated for group in groups) / len(groups)
    return sum(group.n_correct for group in groups) / len(groups), cut


def _encode(
    problem: ArithmeticProblem, tokenizer: Any, config: Config, repeats: random.Random | None
) -> tuple[list[int], list[int]]:
    """Prompt and response tokens of a worked example, with ``repeats`` those that the warm-up asks for."""
    assert config.model.tiny is not None
    prompt = tokenizer(apply_template(config.data.prompt_template, problem.question))["input_ids"]
    solution = worked_solution(problem)
    if repeats is not None:
        solution = with_repeats(solution, config.model.tiny.warmup.repeat, repeats)
    return prompt, [*tokenizer(solution)["input_ids"], tokenizer.eos_token_id]


def _next_token_loss(model: Any, batch: list[tuple[list[int], list[int]]], pad_id: int) -> Tensor:
    """Mean cross-entropy over response tokens."""
    width = max(len(prompt) + len(response) for prompt, response in batch)
    ids = torch.full((len(batch), width), pad_id)
    targets = torch.full((len(batch), width), -100)
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(response)
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
