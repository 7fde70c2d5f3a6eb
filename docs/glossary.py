"""The meaning of every metric, for docs/metrics.md (``python -m docs.generate``)."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from dapo_runner.logging.metric_table import PANELS, SUPERVISED_PANELS
from dapo_runner.timing import PHASES

HEADER = """\
# Metrics

Look up any metric that a run logs: its unit, its meaning, the panel of the report that shows it,
and what a healthy value looks like. `metrics.jsonl` has one line for each step and one for each
evaluation, `timings.jsonl` one line for each step.

A `*` stands for a name or a number, for example the k of `avg@k`. A mean over tokens counts the
tokens that train. A metric of an update is averaged over the updates of a step. Where no healthy
value is given, the value only describes the step.

If a value looks wrong, read [troubleshooting](troubleshooting.md).

This page is generated: `python -m docs.generate`.
"""
AREAS = {
    "eval": "Evaluation (`eval/`): held-out problems",
    "batch": "Batch (`batch/`): the groups that the step trains on",
    "reward": "Rewards (`reward/`): each of several rewards, and calls of reward functions",
    "sampling": "Sampling (`sampling/`): everything that the step generated, accepted or not",
    "train": "Updates (`train/`)",
    "sync": "Weight synchronization (`sync/`): rollout engine against trainer",
    "async": "Asynchronous rollouts (`async/`)",
    "segments": "Segment advantages (`segments/`)",
    "reflection": "Reflection phrases (`reflection/`)",
    "speed": "Speed (`speed/`, in `timings.jsonl`)",
    "seconds": "Time (`seconds/`, in `timings.jsonl`); the phases add up to the wall time of the step",
}
# key | unit | meaning | healthy value
ROWS = """
eval/avg@* | share | Accuracy: mean correctness of k samples per problem. | rises; `eval/pass@k` stays above it
eval/cons@* | share | Accuracy of the majority vote over the k samples. Absent if the reward returns no extracted answers. | at or above `avg@k`
eval/pass@* | share | Unbiased estimate of the probability that at least one of j samples is correct. | rises, or stays: a falling pass@k means less diversity
eval/reward | reward | Mean reward without the length penalty. | rises with the accuracy
eval/reward_* | reward | Mean of one of several rewards. |
eval/length | tokens | Mean response length. | well below the response limit
eval/truncated | share | Responses that reach the token limit. | below 0.1
eval/no_answer | share | Incorrect responses without an extracted answer. | near 0; if not, check the prompt template
eval/problems | count | Problems evaluated. | constant
eval/unsettled_votes | count | Comparisons of two answers that failed or timed out. They count as different answers. | 0
eval/loss | nats per token | Cross-entropy of the held-out completions (`dapo sft`). | falls; a rise means overfitting
eval/examples | count | Held-out examples (`dapo sft`). | constant
eval/*/* | | The metric of one evaluation set or data source: `eval/SET/avg@4`, `eval/SOURCE/avg@4`. | as the metric itself
batch/groups | count | Groups that the step trains on. | `sampler.prompts_per_step`
batch/age | steps | Mean number of steps between sampling a group and training on it. | 0, or small with asynchronous rollouts
batch/age_max | steps | Largest such number. | at most `sampler.max_age`
batch/reward | reward | Mean reward, length penalty included. | rises
batch/accuracy | share | Correct responses. Dynamic sampling removes easy and hard prompts, so this stays near the middle. | 0.2 to 0.8
batch/length_penalty | reward | Mean soft overlong penalty. It is 0 or negative. | near 0
batch/length | tokens | Mean response length. | changes slowly
batch/length_max | tokens | Longest response. | at most the response limit
batch/truncated | share | Responses that reach the token limit. | below 0.1
batch/masked | share | Responses that do not train, for example by overlong filtering. | near `batch/truncated` with overlong filtering, else 0
batch/generation_prob | probability | Mean probability of the sampled tokens (Figure 7 of the DAPO paper). | rises slowly; near 1 means that exploration has ended
batch/rule_* | share | Responses judged by one of the answer rules (`none`: no rule found an answer). | `rule_none` near 0
reward/* | reward | Mean of one of several rewards (`reward.parts`). |
reward/*_std | reward | Standard deviation of that reward within a group, averaged over groups. | above 0: a reward at 0 gives no gradient
reward/calls | count | Calls of reward functions or of the judge in the step (in `timings.jsonl`). |
reward/retried | count | Calls that were repeated after an error. | near 0
reward/failed | count | Calls that failed after all retries. | 0
sampling/rounds | count | Rounds of generation that the step needed. 0 if the waiting groups were enough. | 0 to 2
sampling/groups | count | Groups generated. |
sampling/carried_in | count | Accepted groups left over from earlier steps. | small
sampling/carried_out | count | Accepted groups left for the next step. | small
sampling/too_old | count | Groups dropped because they waited longer than `sampler.max_age`. | 0 or small
sampling/dropped | count | Prompts without a group, because `sampler.oversample` submits more than it needs. |
sampling/all_correct | share | Groups whose responses are all correct. | rises during training
sampling/all_incorrect | share | Groups whose responses are all incorrect. | falls; near 1 means that the task is too hard
sampling/mixed | share | Groups with correct and incorrect responses. Dynamic sampling accepts these. | 0.2 or more
sampling/varying_reward | share | Groups whose rewards differ. Accepted with `sampler.filter_on=reward`. | 0.2 or more
sampling/varying_reward_only | share | Groups whose rewards differ although all responses are correct, or all are incorrect. Only `sampler.filter_on=reward` accepts these. |
sampling/equal_reward | share | Groups whose rewards are all equal. They are filtered out. | below 0.8
sampling/accuracy | share | Correct responses. | rises
sampling/reward | reward | Mean reward. | rises
sampling/length | tokens | Mean response length. | changes slowly
sampling/truncated | share | Responses that reach the token limit. | below 0.1
sampling/tokens | tokens | Tokens generated for the step, including groups that were filtered out. |
train/loss | nats per token | Loss, averaged over the updates. A policy loss is not expected to fall. | near 0; in `dapo sft` it falls
train/grad_norm | norm | Gradient norm before clipping. | stable; repeated peaks mean that the learning rate is too high
train/lr | rate | Learning rate. | follows the schedule
train/updates | count | Optimizer steps. | constant
train/tokens | tokens | Tokens that train, summed over the updates. |
train/entropy | nats per token | Mean entropy of the policy over the whole vocabulary. | falls slowly, then levels off; near 0 early means collapse
train/ratio | ratio | Mean importance ratio of the new policy to the old policy. | 0.99 to 1.01
train/ratio_max | ratio | Largest ratio of a token. | below 10
train/approx_kl | nats per token | Mean of old log-prob − new log-prob, an estimate of KL(old‖new). | below 0.01
train/clip_low | share | Tokens whose gradient the lower clip bound removes (A < 0, ratio < 1 − `clip_low`). | below 0.02 for token ratios
train/clip_high | share | Tokens whose gradient the upper clip bound removes (A > 0, ratio > 1 + `clip_high`). | below 0.02 for token ratios
train/clip_dual | share | Tokens that reach the dual clip bound. | near 0
train/clip_high_prob | probability | Mean probability of the tokens that the upper clip bound stops (Figure 3 of the DAPO paper). Absent if there are none. | low: clip-higher is meant for unlikely tokens
train/ref_kl | nats per token | KL estimate to the reference model. 0 without a reference. | rises slowly
train/nonfinite | count | Tokens with a log-prob that is not finite. The run stops at the first one. | 0
train/positive_logprobs | count | Tokens with a log-prob above 0 in any input. | 0
train/rollout_gap | nats per token | Mean abs(trainer log-prob − rollout engine log-prob) of the sampled tokens. | float32 below 1e-4, bfloat16 below 0.1; more if groups waited (`batch/age`)
train/rollout_gap_max | nats | Largest such difference. | stable
train/rollout_k3 | nats per token | k3 estimate of KL(engine‖trainer). | below 0.01
train/rollout_ess | share | Effective sample size of the weights trainer/engine. | above 0.9
train/rollout_masked | share | Tokens with weight 0 by `rollout.correction.mask`. | below 0.05
train/rollout_unknown | share | Tokens for which the engine returned no log-prob. | near 0
train/margin | nats | Preference training: mean of chosen reward − rejected reward. | rises
train/accuracy | share | Preference training: pairs with a positive margin. | above 0.5 and rising
train/reward_chosen | nats | Preference training: mean implicit reward of the chosen responses. | above `train/reward_rejected`
train/reward_rejected | nats | Preference training: mean implicit reward of the rejected responses. |
train/logprob_chosen | nats | Preference training: mean log-prob of a chosen response. | does not fall steadily
train/logprob_rejected | nats | Preference training: mean log-prob of a rejected response. |
train/pairs | count | Preference training: pairs, summed over the updates. |
train/ties | count | Preference training: pairs dropped because both rewards are equal. | small against `train/pairs`
train/return | reward | Mean return of the step's tokens, before the updates. | rises
train/reward_kl | nats per token | Mean KL estimate that `reward.kl` subtracts from the rewards, without its coefficient. | rises slowly
train/explained_variance | share | Variance of the returns that the critic explains. 1 is perfect, 0 is no better than a constant. | rises above 0
train/value_loss | squared reward | Loss of the critic. | falls
train/value_clip | share | Tokens at which the critic's clip is active. | below 0.2
train/value_grad_norm | norm | Gradient norm of the critic before clipping. | stable
train/value_lr | rate | Learning rate of the critic. | follows the schedule
sync/gap | nats per token | Mean abs(trainer log-prob − engine log-prob), measured with a few prompts after each weight update. | stable; float32 below 1e-3, bfloat16 below 0.2
sync/gap_max | nats | Largest such difference. | stable
async/ready_steps | steps | Sampled steps that wait for training. | above 0 if rollouts keep up
async/in_flight | count | Prompts in flight. |
async/across_updates | share | Responses sampled by more than one version of the weights. |
segments/tokens | tokens | Tokens of the continuations (chain) or of the trees. |
segments/prefixes | count | Distinct prefixes that were continued (chain). |
segments/continuations | count | Continuations generated (chain). |
segments/per_response | count | Mean number of segments in a response. | above 1
segments/advantage | reward | Mean absolute advantage of a segment. | above 0
segments/zero | share | Segments with advantage 0. | below 0.8
segments/waiting | count | Responses of trees that wait for a later step. |
segments/too_old | count | Responses of trees dropped because they are past `sampler.max_age`. | 0
reflection/responses | share | Responses with at least one reflection phrase ("wait, …", "let me verify", "重新考虑"). |
reflection/en | per response | English reflection phrases. |
reflection/zh | per response | Chinese reflection phrases. |
speed/ranks | count | Processes. | constant
speed/tokens_per_second | tokens/s | Trained positions of all ranks, divided by the wall time of the step. | stable
speed/mfu | share | Model FLOPs utilization of the forward and backward passes. Absent for an unknown device. | 0.3 to 0.5 on GPUs
speed/memory_gib | GiB | Peak memory of the largest rank: allocated on a GPU, resident on a CPU. | below the device's memory
"""


def rows() -> list[tuple[str, str, str, str]]:
    """Return key, unit, meaning and healthy value of each metric."""
    table = [tuple(cell.strip() for cell in line.split("|")) for line in ROWS.strip().splitlines()]
    phases = [
        (f"seconds/{phase}", "s", f"{meaning[:1].upper()}{meaning[1:]}.", "") for phase, meaning in PHASES.items()
    ]
    return [(key, unit, meaning, healthy) for key, unit, meaning, healthy in [*table, *phases]]


def is_documented(key: str) -> bool:
    """Return whether a logged metric has a row."""
    return any(fnmatchcase(key, pattern) for pattern, *_ in rows())


def panel_of(key: str) -> str:
    """Return the title of the report's panel that draws a metric; empty where none does."""
    panels = {curve.key: panel.title for panel in (*SUPERVISED_PANELS, *PANELS) for curve in panel.curves}
    return "Time" if key.startswith("seconds/") else panels.get(key, "")


def page() -> str:
    """Return the text of docs/metrics.md."""
    return "\n".join([HEADER, *(part for area, title in AREAS.items() for part in _section(area, title))])


def _section(area: str, title: str) -> Iterator[str]:
    yield f"## {title}\n\n| metric | unit | meaning | panel | healthy value |\n|---|---|---|---|---|"
    for key, unit, meaning, healthy in rows():
        if key.startswith(f"{area}/"):
            yield f"| `{key}` | {unit} | {meaning} | {panel_of(key)} | {healthy} |"
    yield ""
