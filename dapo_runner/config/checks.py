"""What one section alone cannot know: settings that do not go together, and those that deserve a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo_runner.config.settings import Config

ONE_GPU = ("auto", "cpu", "cuda", "cuda:0")  # where a vLLM in this process can be


def mismatches(config: Config) -> Iterator[str]:
    """Problems between sections, each as `key: expected, got`."""
    overlong, limit = config.reward.overlong, config.rollout.max_response_tokens
    if overlong.soft_punishment:
        if config.overlong_max_length > limit:
            yield (
                f"reward.overlong.max_length: expected at most rollout.max_response_tokens={limit}, "
                f"beyond which no response goes, got {overlong.max_length}"
            )
        if overlong.cache_length >= config.overlong_max_length:
            yield (
                f"reward.overlong.cache_length: expected less than L_max={config.overlong_max_length} "
                f"(reward.overlong.max_length or rollout.max_response_tokens), got {overlong.cache_length}"
            )
    if config.responses_per_step % config.mini_batch_size:
        yield (
            f"optimizer.mini_batch_size: expected a divisor of the {config.responses_per_step} responses of "
            f"a step (sampler.prompts_per_step × rollout.group_size), got {config.mini_batch_size}"
        )
    if config.rollout.correction.enabled and config.loss.old_logprobs == "rollout":
        yield (
            "rollout.correction: expected loss.old_logprobs=learner beside it: a ratio against the engine's own "
            "log-probs holds the correction already"
        )
    longest = config.rollout.max_prompt_tokens + limit - 1
    if config.optimizer.token_budget < longest:
        yield (
            f"optimizer.token_budget: expected at least {longest}, the positions of the longest sequence "
            "(rollout.max_prompt_tokens + rollout.max_response_tokens − 1), "
            f"got {config.optimizer.token_budget}"
        )
    if config.rollout.engine == "vllm" and config.run.device not in ONE_GPU:
        yield (
            f"run.device: expected {', '.join(ONE_GPU)} with rollout.engine=vllm, which takes the first GPU it sees, "
            f"got {config.run.device!r}; CUDA_VISIBLE_DEVICES chooses another"
        )


def cautions(config: Config) -> Iterator[str]:
    """What runs and may not be meant, each as `key: what follows from it`."""
    if config.rollout.top_p < 1:
        yield (
            f"rollout.top_p={config.rollout.top_p:g}: responses come from the nucleus, the update takes them for the "
            "policy's own: the ratio is biased"
        )
