"""What every engine in this process has to do, and the log-probs of its model by one pass over a whole sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dapo_runner.types import Completion, Prompt, RolloutRequest, SamplingParams, make_requests

LogProbs = Callable[[Prompt, Completion, float], Tensor]  # of a response at a temperature


def prompt(text: str, engine: Any) -> Prompt:
    return Prompt(text, tuple(engine.tokenizer(text)["input_ids"]), text, "")


def model_logprobs(model: Any, asked: Prompt, answer: Completion, temperature: float = 1.0) -> Tensor:
    """Return those of a response's tokens, computed without a cache."""
    ids, start = torch.tensor([*asked.token_ids, *answer.token_ids.tolist()]), len(asked.token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]


def tokens_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [one.token_ids.tolist() for one in chain(*groups)]


def check_responses(engine: Any, logprobs_of: LogProbs, sampling: SamplingParams) -> Counter[str]:
    """Check how responses end, their texts and their log-probs. Return how many ended for each reason."""
    prompts = [prompt(text, engine) for text in ("1+1=", "123+45678=", "7", "90+90=")]
    groups, reasons = engine.generate(make_requests(prompts, sampling)), Counter[str]()
    assert [len(group) for group in groups] == [sampling.n] * len(prompts)
    for asked, group in zip(prompts, groups, strict=True):
        for answer in group:
            tokens = answer.token_ids.tolist()
            assert not {*tokens[:-1]} & {*engine.stop_ids}
            assert (tokens[-1] in engine.stop_ids) == (answer.finish_reason == "stop")
            assert answer.finish_reason == "stop" or len(tokens) == sampling.max_tokens
            assert answer.text == engine.tokenizer.decode(tokens, skip_special_tokens=True)
            expected = logprobs_of(asked, answer, sampling.temperature)
            torch.testing.assert_close(answer.logprobs, expected, atol=1e-4, rtol=1e-4)
            reasons[answer.finish_reason] += 1
    return reasons


def check_seeds(engine: Any) -> None:
    asked = [prompt("12+34=", engine)] * 2
    first, again, other = (
        tokens_of(engine.generate(make_requests(asked, SamplingParams(n=8, max_tokens=16, seed=seed))))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[1:8] != other[:7]  # a seed and a sample are no sum
    assert len(set(map(tuple, first))) > 8  # neither samples nor equal prompts share their dice


def check_stop_string(engine: Any, n: int) -> list[tuple[Completion, Completion]]:
    """Check that a response is the same up to the token that completes the string. Return those without and with it."""
    asked, sampling = [prompt("12+34=", engine), prompt("7", engine)], SamplingParams(n=n, max_tokens=12)
    whole = list(chain(*engine.generate(make_requests(asked, sampling))))
    counts = Counter(c.text[i : i + 2] for c in whole for i in range(len(c.text) - 1))
    stop = next(text for text, _ in counts.most_common() if text[0] != text[1])
    cut = list(chain(*engine.generate(make_requests(asked, replace(sampling, stop=("no such thing", stop))))))
    for one, other in zip(whole, cut, strict=True):
        if stop not in one.text:
            assert (one.token_ids.tolist(), one.finish_reason) == (other.token_ids.tolist(), other.finish_reason)
            continue
        assert other.finish_reason == "stop"
        assert other.text == one.text[: one.text.index(stop) + 2]
        assert other.token_ids.tolist() == one.token_ids[: other.length].tolist()
    assert {one.length == 12 for one in cut if stop in one.text} == {True, False}  # also with the last token
    each = [replace(sampling, n=1), replace(sampling, n=1, stop=(stop,))]
    assert tokens_of(engine.generate([*map(RolloutRequest, (0, 1), asked, each)]))[0] == whole[0].token_ids.tolist()
    return list(zip(whole, cut, strict=True))


def check_prefix(engine: Any) -> None:
    """Check that a prefix is continued, with limits of its own."""
    asked = prompt("12+34=", engine)
    ((whole,),) = engine.generate(make_requests([asked], SamplingParams(temperature=0.0, max_tokens=9)))
    tokens = whole.token_ids.tolist()
    prefix = Prompt("prefix", (*asked.token_ids, *tokens[:4]), "", "")
    limits = [SamplingParams(temperature=0.0, max_tokens=5), SamplingParams(n=2, temperature=0.0, max_tokens=2)]
    found = engine.generate([*map(RolloutRequest, (0, 1), (prefix, asked), limits)])
    assert tokens_of(found) == [tokens[4:], tokens[:2], tokens[:2]]
