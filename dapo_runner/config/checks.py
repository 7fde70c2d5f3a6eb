"""Check what one section alone cannot know: settings that do not fit each other, and those that deserve a caution."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dapo_runner.config.advantage import COMPARING, steps_of_tree
from dapo_runner.config.reward import RULES
from dapo_runner.config.section import read_key, spell, unmet_requirements
from dapo_runner.config.settings import Config

ONE_GPU = ("auto", "cpu", "cuda", "cuda:0")  # where an engine can be that takes the first GPU it sees
Check = tuple[str, bool, str]  # a key, whether its value fits, what is expected of it


def mismatches(config: Config) -> Iterator[str]:
    """Yield a line for each problem: `key: requires …` or `key: expected …, got …`."""
    yield from unmet_requirements(config)
    for check in CHECKS:
        yield from failures(config, check)


def failures(config: Config, check: Callable[[Config], Iterator[Check]]) -> Iterator[str]:
    for key, fits, expected in check(config):
        if not fits:
            yield f"{key}: expected {expected}, got {spell(read_key(config, key))}."


def _overlong(config: Config) -> Iterator[Check]:
    overlong, limit, longest = config.reward.overlong, config.rollout.max_response_tokens, config.overlong_max_length
    if overlong.soft_punishment:
        yield "reward.overlong.max_length", longest <= limit, f"at most rollout.max_response_tokens={limit}"
        key = "reward.overlong.cache_length"
        yield key, overlong.cache_length < longest, f"less than L_max={longest} (or soft_punishment=false)"


def _batches(config: Config) -> Iterator[Check]:
    key, size, trained = "optimizer.mini_batch_size", config.mini_batch_size, config.trained_per_step
    yield key, trained % size == 0, f"a divisor of the {trained} responses that a step trains on"
    yield key, config.preference is None or size % 2 == 0, "an even number with preference"
    factor = 1 if config.preference is None else 2
    least = factor * (config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1)
    what = "sequence" if factor == 1 else "pair"
    yield "optimizer.token_budget", config.optimizer.token_budget >= least, f"at least {least}, the longest {what}"


def _group_size(config: Config) -> Iterator[Check]:
    key, size, advantage = "rollout.group_size", config.rollout.group_size, config.advantage
    compares = (advantage.segments is None and advantage.kind in COMPARING) or config.sampler.filter_groups
    yield key, size > 1 or not compares, f"at least 2 with advantage.kind={advantage.kind} or sampler.filter_groups"
    pairs = config.preference.pairs_per_group if config.preference else 0
    yield key, size >= 2 * pairs, f"at least {2 * pairs} with preference.pairs_per_group={pairs}"


def _tree(config: Config) -> Iterator[Check]:
    tree, segments, limit = config.tree, config.advantage.segments, config.rollout.max_response_tokens
    if tree is None or segments is None:
        return
    size = config.rollout.group_size
    yield "rollout.group_size", bool(tree.branching), "a product of two numbers (or advantage.segments.branching)"
    if tree.branching:
        shape = f"advantage.segments.branching={list(tree.branching)}"
        yield "rollout.group_size", size == tree.leaves, f"{tree.leaves}, the responses of {shape}"
        fits = tree.tokens > 0 and tree.before_last < limit
        yield "advantage.segments.tokens", fits, f"less than {limit} tokens (rollout) in all levels but the last"
    if segments.per_step is not None:
        steps = steps_of_tree(size, segments.per_step)
        yield "sampler.max_age", config.max_age >= steps - 1, f"at least {steps - 1}: a tree trains for {steps} steps"


def _engine(config: Config) -> Iterator[Check]:
    """Check the settings that not every engine supports."""
    rollout, engine = config.rollout, config.rollout.engine_spec
    name = f"with rollout.engine={rollout.engine}"
    low, high = engine.temperatures
    for key in ("rollout.temperature", "evaluation.temperature"):
        yield key, read_key(config, key) == 0 or low <= read_key(config, key) <= high, f"{low:g} to {high:g} {name}"
    on_first_gpu = not engine.reserves_memory or config.run.device in ONE_GPU
    yield "run.device", on_first_gpu, f"{', '.join(ONE_GPU)} {name} (CUDA_VISIBLE_DEVICES chooses a GPU)"
    n_samples = max(rollout.group_size, config.evaluation.k)
    fits = not engine.takes_whole_groups or rollout.max_batch_sequences >= n_samples
    yield "rollout.max_batch_sequences", fits, f"at least {n_samples} (rollout.group_size, evaluation.k)"
    shared = config.parallel.rollout_tensor
    yield "parallel.rollout_tensor", shared == 1 or engine.is_tensor_parallel, f"1 {name}"
    yield "rollout.max_staleness", not rollout.max_staleness or engine.is_asynchronous, f"0 {name}"
    yield "sampler.oversample", config.sampler.oversample == 1 or engine.drops_answers, f"1 {name}"


def _sampling_mask(config: Config) -> Iterator[Check]:
    rollout, kept = config.rollout, config.rollout.engine_spec.names_kept_tokens
    if rollout.sampling_mask:
        key, name = "rollout.sampling_mask", f"rollout.engine={rollout.engine}"
        yield key, bool(rollout.truncations), "false without rollout.top_p, top_k or min_p"
        yield key, kept != "none", f"false with {name}"
        yield "rollout.top_k", kept != "top_k" or rollout.top_k is not None, f"a number with {key} and {name}"


def _max_age(config: Config) -> Iterator[Check]:
    staleness = config.rollout.max_staleness
    yield "sampler.max_age", config.max_age >= staleness, f"at least rollout.max_staleness={staleness}"


def _routing_replay(config: Config) -> Iterator[Check]:
    fits = config.updates_per_step > 1 or config.rollout.correction.enabled or not config.loss.routing_replay
    yield "loss.routing_replay", fits, "false with one update per step (optimizer.mini_batch_size)"


def check_schedule(config: Config) -> Iterator[Check]:
    """Check that the warm-up ends before the schedule does."""
    optimizer, steps = config.optimizer, config.run.steps
    fits = optimizer.schedule == "constant" or optimizer.warmup_steps < steps
    yield "optimizer.warmup_steps", fits, f"fewer than the {steps} steps"


def _critic(config: Config) -> Iterator[Check]:
    critic, steps = config.critic, config.run.steps - config.run.forked_at
    yield "critic", critic is not None or config.advantage.kind != "gae", "a section ({}) with advantage.kind=gae"
    if critic is not None:
        yield "critic.warmup_steps", critic.warmup_steps < steps, f"fewer than the {steps} steps of the run"


def _data(config: Config) -> Iterator[Check]:
    data = config.data
    heldout = data.format == "arithmetic" or data.eval_size or data.eval
    yield "data.eval_size", config.run.early_stop is None or bool(heldout), "more than 0 with run.early_stop"
    if data.columns is not None and data.columns.answer is None:
        checked = [
            use for use in config.reward.uses if use in RULES and not (use == "json" and config.reward.json_schema)
        ]
        yield "data.columns.answer", not checked, f"a column, which reward {', '.join(checked)} reads"


CHECKS = (
    _overlong,
    _batches,
    _group_size,
    _tree,
    _engine,
    _sampling_mask,
    _max_age,
    _routing_replay,
    check_schedule,
    _critic,
    _data,
)


def cautions(config: Config) -> Iterator[str]:
    """Yield what works and may not be meant, each as `key: what follows from it`."""
    rollout, sampler, reward = config.rollout, config.sampler, config.reward
    truncated = ", ".join(f"rollout.{name}={value:g}" for name, value in rollout.truncations.items())
    if truncated and not rollout.sampling_mask:
        yield f"{truncated}: the importance ratio is biased. Set rollout.sampling_mask=true to correct it."
    if rollout.max_staleness and rollout.partial:
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: one response may come from several policies, "
            "each token weighted by its own. Set rollout.partial=false to finish responses before new weights come."
        )
    if sampler.oversample > 1:
        yield f"sampler.oversample={sampler.oversample:g}: long responses are rarer in training than they are sampled."
    soft = reward.judge is not None and reward.judge.reward == "soft"
    graded = ":" in reward.kind or (reward.kind == "judge" and soft)
    if graded and sampler.filter_groups and sampler.filter_on is None:
        yield (
            f"reward.kind={reward.kind}: groups are accepted by correctness, so graded rewards are lost where all "
            "samples are correct or all incorrect. Set sampler.filter_on=reward to keep them (or =correctness)."
        )
