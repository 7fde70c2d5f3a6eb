"""What one section alone cannot know: settings that do not go together, and those that deserve a word."""

from __future__ import annotations

from collections.abc import Iterator

from dapo_runner.config.advantage import BY_TOKEN, COMPARING, steps_of_tree
from dapo_runner.config.reward import RULES
from dapo_runner.config.settings import Config

ONE_GPU = ("auto", "cpu", "cuda", "cuda:0")  # where a vLLM in this process can be
# vLLM 0.32 samples at 0.01 whatever smaller temperature it is given (0, greedy, apart) and takes none above 2.
VLLM_TEMPERATURES = (0.01, 2.0)


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
                f"(reward.overlong.max_length or rollout.max_response_tokens), got {overlong.cache_length}; "
                "reward.overlong.soft_punishment=false takes the length term away"
            )
    if config.trained_per_step % config.mini_batch_size:
        factor = "rollout.group_size" if config.preference is None else "2 × preference.pairs_per_group"
        yield (
            f"optimizer.mini_batch_size: expected a divisor of the {config.trained_per_step} responses of "
            f"a step (sampler.prompts_per_step × {factor}), got {config.mini_batch_size}"
        )
    if config.rollout.correction.enabled and config.loss.old_logprobs == "rollout":
        yield (
            "rollout.correction: expected loss.old_logprobs=learner beside it: a ratio against the engine's own "
            "log-probs holds the correction already"
        )
    yield from _correction_without_use(config)
    if config.sampler.filter_on == "reward" and not config.sampler.filter_groups:
        yield "sampler.filter_on: expected sampler.filter_groups=true beside it, without which nothing is filtered"
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
    yield from _temperatures_of_vllm(config)
    yield from _sampling_mask(config)
    yield from _groups_of_servers(config)
    yield from _shared_servers(config)
    yield from _ahead(config)
    yield from _oversample(config)
    yield from _pairs(config)
    yield from _routing(config)
    yield from schedule_mismatches(config)
    yield from _advantages(config)
    yield from _critic(config)
    yield from _nothing_to_stop_by(config)
    yield from _rules_without_answers(config)
    yield from _segments(config)


def _segments(config: Config) -> Iterator[str]:
    segments, rollout = config.advantage.segments, config.rollout
    if segments is None:
        return
    if rollout.stop:
        yield (
            "rollout.stop: expected none beside advantage.segments: a stop string may begin in one segment and end in "
            f"the next, which an engine that continues from there does not see, got {rollout.stop}"
        )
    if config.reward.calls.max_failed:
        yield (
            "reward.calls.max_failed: expected 0 beside advantage.segments, whose values want every reward, got "
            f"{config.reward.calls.max_failed:g}"
        )
    tree = config.tree
    if tree is None:
        return
    if not tree.branching:
        yield (
            "rollout.group_size: expected a product, by which the responses of a tree branch (or "
            f"advantage.segments.branching beside it), got {rollout.group_size}"
        )
    elif rollout.group_size != tree.leaves:
        yield (
            f"rollout.group_size: expected {tree.leaves}, the responses of a whole tree of "
            f"advantage.segments.branching={list(tree.branching)}, got {rollout.group_size}"
        )
    elif tree.before_last >= rollout.max_response_tokens or not tree.tokens:
        yield (
            f"advantage.segments.tokens: expected 1 or more, and less than rollout.max_response_tokens="
            f"{rollout.max_response_tokens} in the {len(tree.branching) - 1} levels before the last, got {tree.tokens} "
            "in each"
        )
    if segments.per_step is not None:
        steps = steps_of_tree(rollout.group_size, segments.per_step)
        if steps - 1 > config.max_age:
            yield (
                f"sampler.max_age: expected at least {steps - 1} with advantage.segments.per_step={segments.per_step}, "
                f"which trains on the {rollout.group_size} responses of a tree over {steps} steps, got "
                f"{config.max_age}"
            )


def _pairs(config: Config) -> Iterator[str]:
    if config.preference is None:
        return
    pairs, group_size = config.preference.pairs_per_group, config.rollout.group_size
    if group_size < 2 * pairs:
        yield (
            f"rollout.group_size: expected at least {2 * pairs} with preference.pairs_per_group={pairs}, two responses "
            f"to a pair, got {group_size}"
        )
    one = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1
    if one <= config.optimizer.token_budget < 2 * one:
        yield (
            f"optimizer.token_budget: expected at least {2 * one} with preference, the positions of the longest pair "
            "(2 × (rollout.max_prompt_tokens + rollout.max_response_tokens − 1)), which is not taken apart, got "
            f"{config.optimizer.token_budget}"
        )
    if config.mini_batch_size % 2:
        yield (
            f"optimizer.mini_batch_size: expected an even number with preference, two responses to a pair, got "
            f"{config.mini_batch_size}"
        )
    for name in ("reference", "reference_ema"):
        value = getattr(config.loss, name)
        if config.preference.reference == "step" and value is not None:
            yield f"loss.{name}: expected null beside preference.reference=step, got {value!r}"
    unread = {
        "loss": ("objective", "overrides", "old_logprobs", "routing_replay"),
        "advantage": ("kind", "segments"),
        "rollout": ("correction", "sampling_mask"),
    }
    for section, names in unread.items():
        for name in names:
            value, field = getattr(getattr(config, section), name), type(getattr(config, section)).model_fields[name]
            if value != field.default:
                yield f"{section}.{name}: expected none beside preference, which has no use for it, got {value}"
    if config.logging.rollouts.per_token:
        yield "logging.rollouts.per_token: expected false beside preference, whose loss is one of pairs, got true"


def _routing(config: Config) -> Iterator[str]:
    if not config.loss.routing_replay or config.preference is not None:
        return
    key = "loss.routing_replay"
    if config.model.tiny is not None:
        yield f"{key}: expected a mixture of experts as model.path, got model.tiny, which is none"
    if config.model.compile:
        yield f"{key}: expected model.compile=false beside it, which leaves the choice of experts no place, got true"
    if config.loss.old_logprobs == "rollout":
        yield f"{key}: expected loss.old_logprobs=learner beside it: an engine does not tell its experts, got rollout"
    elif config.updates_per_step == 1 and not config.rollout.correction.enabled:
        yield (
            f"{key}: expected several updates a step (optimizer.mini_batch_size less than its "
            f"{config.trained_per_step} responses): the first one's own pass gives the old log-probs, got one"
        )


def schedule_mismatches(config: Config) -> Iterator[str]:
    """Yield the settings of the learning rate that its schedule does not use or cannot follow."""
    optimizer, steps = config.optimizer, config.run.steps
    if optimizer.schedule == "constant":
        if optimizer.min_lr_ratio:
            yield "optimizer.min_lr_ratio: requires optimizer.schedule=linear or cosine, got constant"
    elif optimizer.warmup_steps >= steps:
        yield f"optimizer.warmup_steps: expected fewer than the {steps} steps of the run, got {optimizer.warmup_steps}"


def _advantages(config: Config) -> Iterator[str]:
    advantage, kind, per_token = config.advantage, config.advantage.kind, f"one of {', '.join(BY_TOKEN)}"
    comparing = kind in COMPARING and advantage.segments is None
    compares = f"advantage.kind={kind}" if comparing else "sampler.filter_groups=true"
    if config.rollout.group_size == 1 and (comparing or config.sampler.filter_groups):
        yield (
            f"rollout.group_size: expected a number greater than or equal to 2 with {compares}, which compares the "
            "samples of a prompt, got 1"
        )
    if config.reward.kl is not None and not advantage.by_token:
        yield (
            f"reward.kl: expected advantage.kind beside it to be {per_token}, for which tokens have rewards, got "
            f"{kind}; loss.overrides.kl_coef is a penalty in the loss"
        )
    if config.reward.kl is not None and config.loss.old_logprobs == "rollout":
        yield (
            "reward.kl: expected loss.old_logprobs=learner beside it, which asks the learner before the updates, got "
            "rollout"
        )
    for name, users in (("gamma", BY_TOKEN), ("whiten", BY_TOKEN), ("lam", ("gae",))):
        value, wanted = getattr(advantage, name), per_token if users == BY_TOKEN else "gae"
        if kind not in users and value != type(advantage).model_fields[name].default:
            yield f"advantage.{name}: expected advantage.kind beside it to be {wanted}, got {name}={value} and {kind}"
    if config.loss.reference_ema is not None and config.model.lora is not None:
        yield "loss.reference_ema: expected model.lora=null beside it: only weights that all train can be followed"


def _critic(config: Config) -> Iterator[str]:
    critic, kind, steps = config.critic, config.advantage.kind, config.run.steps - config.run.forked_at
    if critic is None:
        if kind == "gae":
            yield "critic: expected a section ({} for the defaults) beside advantage.kind=gae, got null"
        return
    if kind != "gae":
        yield f"critic: expected advantage.kind=gae beside it, which alone asks for values, got {kind}"
    if critic.share_trunk and config.parallel.sequence > 1:
        yield (
            "critic.share_trunk: expected parallel.sequence=1 beside it (a critic of its own shares positions), got "
            f"{config.parallel.sequence}"
        )
    if critic.warmup_steps >= steps:
        yield f"critic.warmup_steps: expected fewer than the {steps} steps of the run, got {critic.warmup_steps}"


def _nothing_to_stop_by(config: Config) -> Iterator[str]:
    if config.run.early_stop is None:
        return
    if not config.run.eval_every:
        yield "run.eval_every: expected more than 0 beside run.early_stop, which goes by evaluations, got 0"
    data = config.data
    if data.format != "arithmetic" and not (data.eval_size or data.eval):
        yield "data.eval_size: expected more than 0 beside run.early_stop, which goes by held-out problems, got 0"


def _rules_without_answers(config: Config) -> Iterator[str]:
    columns = config.data.columns
    if columns is None or columns.answer is not None:
        return
    for use in config.reward.uses:
        if use in RULES and not (use == "json" and config.reward.json_schema):
            yield f"data.columns.answer: expected the column that reward {use} holds responses against, got null"


def _correction_without_use(config: Config) -> Iterator[str]:
    correction = config.rollout.correction
    for limit, user in (("cap", "weights"), ("bound", "mask")):
        value, default = getattr(correction, limit), type(correction).model_fields[limit].default
        if getattr(correction, user) is None and value != default:
            yield (
                f"rollout.correction.{limit}: expected rollout.correction.{user}=token or sequence beside it, which "
                f"alone it limits, got {limit}={value:g} and {user}=null"
            )


def _temperatures_of_vllm(config: Config) -> Iterator[str]:
    if config.rollout.engine == "hf":
        return
    low, high = VLLM_TEMPERATURES
    for section, greedy in (("rollout", False), ("evaluation", True)):
        temperature = getattr(config, section).temperature
        if not (low <= temperature <= high or (greedy and temperature == 0)):
            yield (
                f"{section}.temperature: expected {low:g} to {high:g}{' or 0' if greedy else ''} with "
                f"rollout.engine={config.rollout.engine}, which samples at {low:g} when asked for less and refuses "
                f"more, got {temperature:g}; rollout.engine=hf samples at any"
            )


def _sampling_mask(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.sampling_mask:
        return
    if not rollout.truncations:
        yield (
            "rollout.sampling_mask: expected rollout.top_p, rollout.top_k or rollout.min_p beside it, which alone cut "
            "the vocabulary down, got true and none of them"
        )
    elif rollout.engine == "server":
        yield "rollout.sampling_mask: expected false with rollout.engine=server, which names no tokens, got true"
    elif rollout.engine == "vllm" and rollout.top_k is None:
        yield (
            "rollout.top_k: expected a number beside rollout.sampling_mask with rollout.engine=vllm, which names the "
            "tokens that it kept only up to a number asked for beforehand, got null; rollout.engine=hf names any number"
        )


def _groups_of_servers(config: Config) -> Iterator[str]:
    """vLLM 0.32 takes no request for more samples than it decodes side by side."""
    rollout = config.rollout
    most = max(rollout.group_size, config.evaluation.k)
    if rollout.engine == "server" and rollout.max_batch_sequences < most:
        yield (
            f"rollout.max_batch_sequences: expected at least {most} with rollout.engine=server, the responses to one "
            f"prompt (rollout.group_size, evaluation.k), got {rollout.max_batch_sequences}"
        )


def _shared_servers(config: Config) -> Iterator[str]:
    """Ranks that share an engine make the same calls, and each would ask the servers."""
    rollout, shared = config.rollout, config.parallel.rollout_tensor
    if rollout.engine == "server" and shared > 1:
        yield (
            "parallel.rollout_tensor: expected 1 with rollout.engine=server, whose GPUs rollout.server.tensor counts, "
            f"got {shared}"
        )


def _ahead(config: Config) -> Iterator[str]:
    rollout, ahead = config.rollout, config.rollout.max_staleness
    if not ahead:
        return
    if rollout.engine != "server":
        yield f"rollout.max_staleness: expected 0 with rollout.engine={rollout.engine}, got {ahead}"
    if rollout.correction.weights is None:
        yield (
            f"rollout.correction.weights: expected token or sequence beside rollout.max_staleness={ahead}, by which "
            "responses of earlier policies are weighed, got null"
        )
    if config.max_age < ahead:
        yield (
            f"sampler.max_age: expected at least rollout.max_staleness={ahead}, as old as a group may be that was not "
            f"left over, got {config.max_age}"
        )
    if config.advantage.segments is not None:
        yield "advantage.segments: expected null beside rollout.max_staleness: the next policy would continue prefixes"


def _oversample(config: Config) -> Iterator[str]:
    oversample, engine = config.sampler.oversample, config.rollout.engine
    if oversample > 1 and engine != "server":
        yield f"sampler.oversample: expected 1 with rollout.engine={engine}, which drops nothing, got {oversample:g}"
    if oversample > 1 and config.advantage.segments is not None:
        yield f"sampler.oversample: expected 1 beside advantage.segments, got {oversample:g}"


def cautions(config: Config) -> Iterator[str]:
    """What runs and may not be meant, each as `key: what follows from it`."""
    truncated = ", ".join(f"rollout.{name}={value:g}" for name, value in config.rollout.truncations.items())
    if truncated and not config.rollout.sampling_mask:
        yield (
            f"{truncated}: responses come from a part of the distribution, the update takes them for the policy's own: "
            "the ratio is biased; rollout.sampling_mask=true has it compare like with like"
        )
    rollout = config.rollout
    if rollout.max_staleness and rollout.partial:
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: responses under way go on under new weights: a long one "
            "is the work of several policies, each token weighed by its own; rollout.partial=false has them end first"
        )
    sampler, judge = config.sampler, config.reward.judge
    if sampler.oversample > 1:
        yield (
            f"sampler.oversample={sampler.oversample:g}: what takes longest in a round is dropped: long responses, and "
            "prompts that want them, are rarer in training than the policy gives them"
        )
    own = ":" in config.reward.kind or (config.reward.kind == "judge" and judge is not None and judge.reward == "soft")
    if own and sampler.filter_groups and sampler.filter_on is None:
        yield (
            f"reward.kind={config.reward.kind}: groups are kept by what it calls correct, so that of a graded reward "
            "those all right or all wrong are lost: sampler.filter_on=reward keeps them (=correctness: this is meant)"
        )
