"""TRL's ``GRPOTrainer`` with its loss computed by this package, from hidden states.

    from dapo_kernels.integrations.trl import DapoGRPOTrainer    # instead of trl.GRPOTrainer

Everything else is TRL's: configuration, generation, rewards, advantages, logged metrics. TRL scores completions by
calling the model with ``fused_lm_head=True``. ``linear_token_logprobs`` answers that call. In the training pass of a
loss whose gradient at a token needs only that token's row, ``linear_dapo_loss`` does: it computes the gradient with the
loss, in three GEMMs instead of four.

``linear_token_logprobs`` leaves the O(tokens) arithmetic to TRL's code and so supports all of its configuration.
``loss_route`` and ``loss_route_reason`` say which one a trainer uses and why. B completions of C tokens each.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dapo_kernels.integrations.heads import LogitRule, check_head, head_of
from dapo_kernels.integrations.probe import check_logits, undisturbed
from dapo_kernels.integrations.versions import TRL, require
from dapo_kernels.logprobs import linear_token_logprobs
from dapo_kernels.losses import linear_dapo_loss
from dapo_kernels.objectives.table import PROMPT_MEAN, Objective

require("dapo_kernels.integrations.trl", *TRL)

from accelerate.utils import is_peft_model  # noqa: E402
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.rewards import get_soft_overlong_punishment  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput  # noqa: E402

from dapo_kernels.integrations.trl_sampling import DynamicSampler, SaveSampler, loss_mask  # noqa: E402

logger = logging.get_logger(__name__)

ONE_CALL = "linear_dapo_loss"
LOGPROBS = "linear_token_logprobs"

_CLIP = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_LOSS_TYPES = (*_CLIP, "cispo", "sapo", "vespo")
_SEQUENCE_MEANS = ("grpo", "sapo")  # every completion has the same weight, whatever its length
_WINDOW_MEANS = ("dapo", "cispo")  # every token of the accumulation window has the same weight
_SCORES = "_get_per_token_logps_and_entropies"
_PROMPT_MEANS = ("dapo", "cispo", "sapo")  # the others are dapo's surrogate with another normaliser


class DapoGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """``trl.GRPOTrainer`` with the same arguments, configuration and metrics; the logits are never held as a whole.

    Args:
        dynamic_sampling: fill every generation batch with groups whose rewards vary (DAPO, section 3.2). Other groups
            are replaced by the next prompts; surplus groups train in the next batch. The soft overlong punishment does
            not count as variation.
        max_sampling_rounds: generation rounds for one batch.
        on_sampling_exhausted: what follows after these rounds: ``"error"``, or ``"train_partial"``: the batch is filled
            with groups whose completions are masked.
        overlong_cache_length: L_cache of the soft overlong punishment (DAPO, eq. 13), in tokens: an additional reward
            that falls from 0 to −1 over this length. ``None``: no punishment.
        overlong_max_length: L_max, the length from which the punishment is −1; ``max_completion_length`` by default.
        overlong_filtering: mask truncated completions in the loss, like ``GRPOConfig(mask_truncated_completions=True)``
            (DAPO, section 3.4). Their rewards, the punishment included, still count in the mean of their group.
        aggregate: ``"prompt-mean-token-mean"`` replaces the normaliser of ``loss_type``: the mean over prompts of the
            token means of their groups (DAPO, eq. 8 as printed). A group's tokens are those of the whole generation
            batch, over all ranks, micro-batches and updates. ``None``: TRL's normaliser.

    Attributes:
        loss_route: ``"linear_dapo_loss"``, or ``"linear_token_logprobs"`` with TRL's own formula.
        loss_route_reason: the settings that require the second, ``""`` for the first.

    Raises:
        ValueError: a setting is not supported; the message says why. In the first step: the model's logits are not its
            output head applied to its last hidden states.

    Example:
        >>> from trl import GRPOConfig
        >>> from dapo_kernels.integrations.trl import DapoGRPOTrainer
        >>> def train(model, dataset, reward):
        ...     config = GRPOConfig(output_dir="runs/trl", loss_type="dapo", beta=0.0)
        ...     trainer = DapoGRPOTrainer(model, reward, config, train_dataset=dataset, dynamic_sampling=True)
        ...     trainer.train()
    """

    def __init__(
        self,
        *args: Any,
        dynamic_sampling: bool = False,
        max_sampling_rounds: int = 10,
        on_sampling_exhausted: Literal["error", "train_partial"] = "error",
        overlong_cache_length: int | None = None,
        overlong_max_length: int | None = None,
        overlong_filtering: bool = False,
        aggregate: Literal["prompt-mean-token-mean"] | None = None,
        **kwargs: Any,
    ) -> None:
        self.aggregate = aggregate
        with _head_without_adapter(args[0] if args else kwargs.get("model")):
            super().__init__(*args, **kwargs)
        self.mask_truncated_completions |= overlong_filtering
        self._choose_route()
        because = f" ({self.loss_route_reason})" if self.loss_route_reason else ""
        logger.info(f"{type(self).__name__}: the loss is computed by {self.loss_route}{because}")
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self._attach(policy, entropy=True)
        if self.ref_model is not None:
            self._attach(self.accelerator.unwrap_model(self.ref_model), entropy=False)
        self._n_rewards = len(self.reward_funcs)
        add_overlong_punishment(self, overlong_cache_length, overlong_max_length)
        self._sampler: DynamicSampler | None = None
        if dynamic_sampling:
            self._sampler = DynamicSampler(self, max_sampling_rounds, on_sampling_exhausted, self._n_rewards)
            self.add_callback(SaveSampler(self._sampler))

    def create_accelerator_and_postprocess(self) -> None:  # before TRL shards the reference model
        super().create_accelerator_and_postprocess()
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy: Any = getattr(plugin, "mixed_precision_policy", None)
        if getattr(policy, "output_dtype", None) is not None:  # FSDP2 would round the log-probs to it
            plugin.mixed_precision_policy = replace(policy, output_dtype=None)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._sampler is not None and resume_from_checkpoint:
            latest = resume_from_checkpoint is True
            folder = get_last_checkpoint(self.args.output_dir) if latest else resume_from_checkpoint
            if folder is not None:
                self._sampler.load(Path(str(folder)))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._sampler is not None and self.model.training:
            logs.update(self._sampler.metrics())
        super().log(logs, start_time)

    def _choose_route(self) -> Objective | None:
        """Return the objective of the settings, which a callback may have changed; ``None`` for TRL's own formula."""
        _refuse(self)
        self.loss_route_reason = _two_pass_reason(self)
        self.loss_route = LOGPROBS if self.loss_route_reason else ONE_CALL
        return None if self.loss_route_reason else objective_of(self)

    def _attach(self, model: Any, *, entropy: bool) -> None:
        check_head(model)
        rule = LogitRule.of(model.config, self.temperature)
        attach_scoring(model, rule, entropy=entropy, float32_head=self.args.cast_lm_head_to_fp32)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        generate = super()._generate_and_score_completions
        output: dict[str, Any]
        if self._sampler is not None and self.model.training:
            output = self._sampler.collect(generate, list(inputs[0]))
        else:
            output = generate(inputs)
        return output if self.aggregate is None else output | prompt_counts(self, output)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if rewards.shape[1] > self._n_rewards:  # one without a score gets none for its length
            unscorable = rewards[:, : self._n_rewards].isnan().all(1)
            rewards[unscorable, self._n_rewards] = torch.nan
        if self._sampler is not None:
            self._sampler.observe(rewards, completion_ids_list)
        return rewards

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        objective = self._choose_route()
        if objective is None:
            return super()._compute_loss(model, inputs)
        scorer = _LossScorer(model, loss_call(self, objective, inputs))
        # TRL's formula again, on log-probs without a gradient, for its metrics: O(tokens).
        super()._compute_loss(scorer, inputs)
        loss = scorer.output.loss
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * scorer.output.aux_loss / _accumulation(self)
        return loss


@contextlib.contextmanager
def _head_without_adapter(model: Any) -> Iterator[None]:
    """Make PEFT's model return the layer under an adapted head inside. TRL refuses the adapter, because its own way
    from hidden states to log-probs would ignore it.
    """
    adapted = isinstance(model, torch.nn.Module) and is_peft_model(model)
    below = getattr(model.get_output_embeddings(), "base_layer", None) if adapted else None
    if below is None:
        yield
        return
    model.get_output_embeddings = lambda: below
    try:
        yield
    finally:
        del model.get_output_embeddings


@dataclass(frozen=True)
class LossCall:
    """The arguments of ``linear_dapo_loss`` besides the head and the tokens; tensors are [B, C] by default."""

    objective: Objective
    mask: Tensor
    advantages: Tensor  # or [B]
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None  # or [B]
    denominator: Tensor | float  # 0-d
    group_tokens: Tensor | None = None  # [B]

    def tensors(self, device: torch.device) -> dict[str, Any]:
        names = ("mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights", "group_tokens")
        values = {name: getattr(self, name) for name in names}
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}


class _LossScorer:
    """Replaces the model in TRL's ``_compute_loss``: requests the loss from it too, and keeps the output."""

    output: FusedCausalLMOutput

    def __init__(self, model: Any, call: LossCall) -> None:
        self.model, self.call = model, call

    def __call__(self, **inputs: Any) -> FusedCausalLMOutput:
        # A function, because FSDP rounds the tensors of a dataclass, such as old log-probs, to bfloat16.
        self.output = self.model(**inputs, dapo_loss=lambda: self.call)
        return self.output


def objective_of(trainer: GRPOTrainer) -> Objective:
    """Return the objective that TRL's settings describe; ``loss_call`` adds the normaliser."""
    args, loss_type = trainer.args, trainer.loss_type
    default = "seq-mean-token-mean" if loss_type in _SEQUENCE_MEANS else "token-mean"
    fields: dict[str, Any] = {"aggregate": getattr(trainer, "aggregate", None) or default}
    if trainer.beta != 0:
        fields |= {"kl_coef": trainer.beta, "kl_estimator": "k3", "kl_through_ratio": args.use_bias_correction_kl}
    if loss_type == "sapo":
        return Objective(surrogate="sapo", sapo_tau=(args.sapo_temperature_pos, args.sapo_temperature_neg), **fields)
    if loss_type == "cispo":  # TRL bounds the ratio itself, only from above
        return Objective(surrogate="cispo", clip_low=1.0, clip_high=trainer.epsilon_high - 1.0, **fields)
    low, high = min(trainer.epsilon_low, 1.0), trainer.epsilon_high  # a ratio is never below 0
    if args.delta is None:
        return Objective(clip_low=low, clip_high=high, **fields)
    # min(min(ρ, δ)·A, clip(ρ)·A): for A > 0 the lower of the two upper bounds applies, for A < 0 the higher one.
    bounds = (args.delta, 1.0 + high)
    return Objective(clip_low=low, clip_high=min(bounds) - 1.0, dual_clip=max(bounds), **fields)


def loss_call(trainer: GRPOTrainer, objective: Objective, inputs: dict[str, Any]) -> LossCall:
    """Return the call of the loss for one micro-batch of TRL."""
    mask = loss_mask(inputs)
    weights = None
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        weights = inputs["importance_sampling_ratio"]
        weights = weights.squeeze(1) if weights.shape[1] == 1 else weights
    return LossCall(
        objective=objective,
        mask=mask.bool(),
        advantages=inputs["advantages"],
        old_logprobs=inputs.get("old_per_token_logps"),
        ref_logprobs=inputs["ref_per_token_logps"] if objective.kl_coef != 0 else None,
        importance_weights=weights,
        denominator=_denominator(trainer, mask, inputs),
        group_tokens=inputs.get("group_tokens"),
    )


def prompt_counts(trainer: GRPOTrainer, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Count a generation batch, over all ranks: ``group_tokens`` [B], and ``num_prompts`` 0-d, with a live token."""
    lengths = loss_mask(inputs).sum(1)
    generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    tokens = trainer.accelerator.gather(lengths).view(-1, generations).sum(1)
    first = trainer.accelerator.process_index * len(lengths)
    group_tokens = tokens.repeat_interleave(generations)[first : first + len(lengths)]
    return {"group_tokens": group_tokens, "num_prompts": (tokens > 0).sum()}


def _accumulation(trainer: GRPOTrainer) -> int:
    """Return the number of micro-batches whose losses add up to one update; 1 in evaluation."""
    steps: int = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    return steps


def _denominator(trainer: GRPOTrainer, mask: Tensor, inputs: dict[str, Any]) -> Tensor | float:
    """Return TRL's normaliser for the loss type, accumulation included. Completions without a live token count, too."""
    steps, loss_type = _accumulation(trainer), trainer.loss_type
    if loss_type in _WINDOW_MEANS or "num_prompts" in inputs:
        count = inputs["num_prompts" if "num_prompts" in inputs else "num_items_in_batch"]
        count = count.clamp(min=1.0) / trainer.accelerator.num_processes
        # A count over the generation batch: take the share of one window.
        return count * steps / trainer.args.steps_per_generation if trainer.model.training else count
    if loss_type == "bnpo":
        return mask.sum().clamp(min=1.0) * steps
    completions = float(mask.shape[0] * steps)
    return completions * trainer.max_completion_length if loss_type == "dr_grpo" else completions


def _two_pass_reason(trainer: GRPOTrainer) -> str:
    """Return the settings with which a token's gradient needs other tokens, or for which no objective exists, and
    whether a subclass computes log-probs of its own.
    """
    args, loss_type = trainer.args, trainer.loss_type
    settings = {
        f"importance_sampling_level={trainer.importance_sampling_level!r}": (
            trainer.importance_sampling_level != "token"
        ),
        f"top_entropy_quantile={trainer.top_entropy_quantile}": trainer.top_entropy_quantile < 1.0,
        f"off_policy_mask_threshold={trainer.off_policy_mask_threshold}": (
            trainer.off_policy_mask_threshold is not None
        ),
        "use_adaptive_entropy=True": trainer.use_adaptive_entropy,
        f"entropy_coef={trainer.entropy_coef}": trainer.entropy_coef != 0.0,
        "loss_type='vespo'": loss_type == "vespo",
        f"an overridden {_SCORES}": (
            getattr(getattr(trainer, _SCORES), "__func__", None) is not getattr(GRPOTrainer, _SCORES)
        ),
        f"delta={args.delta} with loss_type={loss_type!r}": (
            loss_type in _CLIP and args.delta is not None and args.delta <= 1.0
        ),
        f"epsilon_high={trainer.epsilon_high} with loss_type='cispo'": (
            loss_type == "cispo" and trainer.epsilon_high < 1.0
        ),
    }
    return ", ".join(name for name, holds in settings.items() if holds)


def _refuse(trainer: GRPOTrainer) -> None:
    """Raise an error for a setting that is not supported."""
    name = type(trainer).__name__
    if trainer.loss_type not in _LOSS_TYPES:
        raise ValueError(f"{name}: unknown loss_type {trainer.loss_type!r}; known: {', '.join(_LOSS_TYPES)}")
    aggregate = getattr(trainer, "aggregate", None)
    if aggregate not in (None, PROMPT_MEAN):
        raise ValueError(f"{name}: aggregate must be {PROMPT_MEAN!r} or None, got {aggregate!r}")
    if aggregate is not None and trainer.loss_type not in _PROMPT_MEANS:
        raise ValueError(
            f"{name}: aggregate={aggregate!r} requires loss_type to be one of {', '.join(_PROMPT_MEANS)}, got "
            f"{trainer.loss_type!r}, whose normaliser it would replace"
        )
    if aggregate is not None and (reason := _two_pass_reason(trainer)):
        raise ValueError(f"{name}: aggregate={aggregate!r} is not supported with {reason}: TRL aggregates then")
    if trainer.args.use_liger_kernel:
        raise ValueError(
            f"{name}: use_liger_kernel=True is not supported: it is not tested with this trainer. Set it to False; TRL "
            "deprecates it in favour of model_init_kwargs={'use_kernels': True}"
        )
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            f"{name}: DeepSpeed ZeRO-3 is not supported: the output head is empty outside its own module, and the loss "
            "multiplies by the head itself; use ZeRO-2 or FSDP2, or trl.GRPOTrainer"
        )
    if trainer.loss_type == "dr_grpo" and trainer.max_completion_length is None:
        raise ValueError(f"{name}: loss_type='dr_grpo' requires max_completion_length, by which it divides; got None")


def add_overlong_punishment(trainer: GRPOTrainer, cache_length: int | None, max_length: int | None) -> None:
    """Add TRL's soft overlong punishment (DAPO, eq. 13) to the reward functions.

    Raises:
        ValueError: the lengths leave no room, or the punishment cannot have a weight of its own.
    """
    name = type(trainer).__name__
    if cache_length is None:
        if max_length is not None:
            raise ValueError(f"{name}: overlong_max_length={max_length} has no effect without overlong_cache_length")
        return
    longest = trainer.max_completion_length if max_length is None else max_length
    if longest is None or not 0 < cache_length <= longest:
        raise ValueError(
            f"{name}: overlong_cache_length must be at least 1 and at most overlong_max_length={longest}, got "
            f"{cache_length}"
        )
    most = trainer.max_completion_length
    if most is not None and longest - cache_length >= most:
        raise ValueError(
            f"{name}: overlong_max_length={longest} must be below max_completion_length + overlong_cache_length = "
            f"{most + cache_length}: no completion is long enough to be punished. Set max_completion_length={longest}, "
            "or leave overlong_max_length out"
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"{name}: overlong_cache_length requires multi_objective_aggregation='sum_then_normalize', got "
            f"{trainer.multi_objective_aggregation!r}, which would divide the punishment by its standard deviation"
        )
    punishment = get_soft_overlong_punishment(longest, cache_length)
    trainer.reward_funcs = [*trainer.reward_funcs, punishment]  # a new list: the caller owns the old one
    trainer.reward_func_names = [*trainer.reward_func_names, punishment.__name__]
    trainer.reward_processing_classes = [*trainer.reward_processing_classes, None]
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.ones(1)])


def attach_scoring(model: Any, rule: LogitRule, *, entropy: bool, float32_head: bool) -> None:
    """Compute ``model(…, labels=…, fused_lm_head=True)`` here; the model handles every other call.

    Only on this instance, as in TRL. ``entropy``: also return entropies, differentiable. ``float32_head``: multiply in
    float32, outside autocast.
    """
    plain, is_checked = model.forward, False

    @torch.compiler.assume_constant_result  # no graph break, and no recompilation after the first call
    def check_once(scored: Any) -> None:
        nonlocal is_checked
        if not is_checked:
            _check_logits(scored, plain)
            is_checked = True

    # ``generate`` checks its arguments against the signature.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return plain(*args, **kwargs)
        check_once(self)  # here, because FSDP2 gathers the weights only in a call
        labels, call = kwargs.pop("labels"), kwargs.pop("dapo_loss", None)
        states = self.base_model(*args, **kwargs, use_cache=False)
        hidden = states.last_hidden_state[:, :-1]
        with torch.autocast(hidden.device.type, enabled=False) if float32_head else contextlib.nullcontext():
            hidden = hidden.float() if float32_head else hidden
            weight, bias, lora = head_of(self, hidden)
            head = {"bias": bias, "lora": lora, "softcap": rule.softcap, "temperature": rule.temperature}
            hidden, labels = hidden.to(weight.device), labels[:, 1:].to(weight.device)
            if call is None:
                output = _logprobs(hidden, weight, head, labels, entropy)
            else:
                output = _loss(hidden, weight, head, labels, call())
        if kwargs.get("output_router_logits"):
            output.aux_loss = _router_loss(self.config.get_text_config(), states, kwargs.get("attention_mask"))
        return output

    model.forward = types.MethodType(forward, model)


@torch.no_grad()
def _check_logits(model: Any, forward: Any) -> None:
    """Run a few tokens and check that the logits of ``forward`` are what the loss assumes."""
    ids = torch.arange(model.config.get_text_config(decoder=True).vocab_size)[None, :9]
    ids = ids.to(model.get_output_embeddings().weight.device)
    with undisturbed(model):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.to(ids.device)
        check_logits(model, hidden, lambda: forward(input_ids=ids, use_cache=False).logits)


def _router_loss(config: Any, states: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the load-balancing loss of a mixture of experts, as the model's own forward computes it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(
        states.router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )


def _logprobs(
    hidden: Tensor, weight: Tensor, head: dict[str, Any], labels: Tensor, entropy: bool
) -> FusedCausalLMOutput:
    """Return log-probs of the labels, 0 where the label is −100."""
    scored = labels != -100
    stats = linear_token_logprobs(hidden, weight, labels.clamp(min=0), mask=scored, entropy=entropy, **head)
    return FusedCausalLMOutput(log_probs=stats.logprobs, entropy=stats.entropy, label_mask=scored)


def _loss(hidden: Tensor, weight: Tensor, head: dict[str, Any], labels: Tensor, call: LossCall) -> FusedCausalLMOutput:
    """Return the loss of the completions, the last C labels, with log-probs and entropies for the metrics."""
    width = call.mask.shape[1]
    hidden, labels = hidden[:, -width:], labels[:, -width:]
    tensors = call.tensors(hidden.device)
    out = linear_dapo_loss(
        hidden,
        weight,
        labels.clamp(min=0),
        objective=call.objective,
        denominator=call.denominator,
        entropy=True,
        **tensors,
        **head,
    )
    # TRL computes a ratio before it masks: let it be 1 for tokens not computed here, not the overflow of 0 − ℓ_old.
    old_logprobs = 0.0 if call.old_logprobs is None else tensors["old_logprobs"]
    logprobs = torch.where(tensors["mask"], out.logprobs, old_logprobs)
    return FusedCausalLMOutput(loss=out.loss, log_probs=logprobs, entropy=out.entropy, label_mask=tensors["mask"])
