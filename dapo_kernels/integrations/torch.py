"""A causal language model and its loss as one module, to wrap with DDP, FSDP2, accelerate or Lightning Fabric.

A wrapper acts on the ``forward`` of its module: it gathers shards for it, and averages gradients of what ran inside it
over the ranks. Hidden states from ``ddp.module.model(…)`` bypass it: every rank then trains on its own gradient,
without an error. So the network and the loss run in this one forward (docs/guide.md, "Several ranks").
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from dapo_kernels.engine.chunks import may_wait
from dapo_kernels.integrations.heads import LogitRule, check_head, head_of
from dapo_kernels.integrations.probe import check_logits, ignores_left_padding, is_causal, is_packable, undisturbed
from dapo_kernels.integrations.rope import fixed_frequencies
from dapo_kernels.layout import check_not_rounded, check_tensor
from dapo_kernels.logprobs import TokenStats, linear_token_logprobs
from dapo_kernels.losses import Chosen, LinearOptions, LossOutput, linear_dapo_loss
from dapo_kernels.objectives.table import FIELDS, is_number, resolve_objective
from dapo_kernels.records import Head, readable
from dapo_kernels.signature import refuse_unknown, shows_options

_REFUSED = {
    "bias": "it is taken from the model's head",
    "lora": "it is taken from the model's head",
    "softcap": "it is taken from the model's configuration",
    "objective": "it is that of PolicyLoss(model, objective=…)",
    "main_grad": "a gradient added there bypasses the hooks that average over ranks",
}
_OF_LOGPROBS = set(inspect.signature(linear_token_logprobs).parameters)
_NAMES = tuple(LinearOptions.__annotations__)
_MAY_BE_ROUNDED = {"mask", *Head._fields}


class PolicyLoss(nn.Module):
    """Compute ``linear_dapo_loss`` of a causal language model of transformers, from token ids.

        policy = DistributedDataParallel(PolicyLoss(model, objective="dapo", temperature=0.7))
        out = policy(ids[:, :-1], ids[:, 1:], old_logprobs, advantages, mask=mask, denominator=denominator)
        out.loss.backward()

    A bias of the head, and soft-capped or scaled logits, are taken from the model. LoRA is supported, also on the head,
    and so is a head that is an FSDP2 unit of its own. All ranks must call it equally often: one without data calls it
    with a batch whose mask is all False, which adds nothing to the gradient.

    Args:
        model: a ``PreTrainedModel`` with a language-model head, or a PEFT model around one.
        objective: as in ``dapo_loss``.
        options: keywords of ``linear_dapo_loss`` for every call: ``clip_high=0.3``, ``temperature=0.7``,
            ``chunk_bytes=``; those of a call take precedence. ``bias``, ``lora``, ``softcap`` and ``main_grad`` are not
            allowed.

    The first call runs the model on a few tokens and checks that its logits and attention are what the loss assumes.

    Raises:
        ValueError: the loss cannot be computed from this model's head; a keyword that is not allowed.
        TypeError: a keyword that ``linear_dapo_loss`` does not have; a model that is wrapped already.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dapo_kernels.integrations.torch import PolicyLoss
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> policy = PolicyLoss(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)), temperature=0.7)
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> out = policy(ids[:, :-1], ids[:, 1:], None, torch.tensor([1.0]))
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4)  # on-policy: −A
        -1.0
    """

    @functools.partial(shows_options, without=_REFUSED)
    def __init__(self, model: Any, *, objective: Chosen = "dapo", **options: Unpack[LinearOptions]) -> None:
        super().__init__()
        _check_model(model)
        _check_options(options)
        given = {name: value for name, value in options.items() if name in FIELDS or name not in _NAMES}
        resolve_objective("PolicyLoss", objective, given)
        self.model = model
        # accelerate reads both from the module that it shards.
        self._no_split_modules, self.tie_weights = model._no_split_modules, model.tie_weights
        self.objective = objective
        self.options = options
        body = _unwrapped(model).base_model
        self._takes_positions = "position_ids" in inspect.signature(body.forward).parameters
        self._packing_error: str | None = None
        self._left_padding_error: str | None = None
        self._is_checked = False
        self._modes_checked: set[str] = set()

    @functools.partial(shows_options, without=_REFUSED)
    def forward(
        self,
        input_ids: Tensor,
        target_ids: Tensor,
        old_logprobs: Tensor | None = None,
        advantages: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        mode: Literal["loss", "logprobs"] = "loss",
        **options: Unpack[LinearOptions],
    ) -> LossOutput | TokenStats:
        """Return the loss of a batch, or the log-probs of its targets at the loss's temperature.

        Args:
            input_ids: [B, L] padded, or [T] packed with ``cu_seqlens``; packed sequences do not see each other.
            target_ids: same shape; the model at ``input_ids[t]`` predicts ``target_ids[t]``: shift before the call.
            old_logprobs, advantages: as in ``dapo_loss``.
            attention_mask: [B, L], bool, or 0 and 1: 0 where ``input_ids`` is padding; right padding needs none.
                Positions count the tokens whose mask is not 0, as in ``generate``.
            mode: ``"logprobs"`` calls ``linear_token_logprobs`` with ``options``, which it must have (``mask``,
                ``temperature``, …), and those of the constructor that it has, without advantages. Differentiable;
                under ``torch.no_grad()`` one GEMM.
            options: keywords of ``linear_dapo_loss`` for this call, not ``objective``.

        Raises:
            ValueError, TypeError: as in ``linear_dapo_loss``; targets that are not shifted, or tokens that train on
                padding (on a GPU, only the first call of each mode checks values); a float16 or bfloat16 tensor other
                than the head, which only a wrapper can have rounded; a model whose logits are not its head applied to
                its last hidden states; a model that is not causal; packed sequences that see each other; left padding
                that changes the hidden states; a sequence so long that longrope or dynamic NTK scaling changes the
                frequencies of the whole batch.
        """
        self._check_call(mode, old_logprobs, advantages, options)
        lasting = {name: value for name, value in self.options.items() if mode == "loss" or name in _OF_LOGPROBS}
        given: dict[str, Any] = {**lasting, **options}
        cu_seqlens = given.get("cu_seqlens")
        _check_ids(input_ids, attention_mask, cu_seqlens)
        reads_values = self._reads_values(input_ids, mode)
        if reads_values and attention_mask is not None:
            _check_attention_mask(attention_mask)
        _check_lengths(_unwrapped(self.model), input_ids, cu_seqlens)
        self._check_architecture(given.get("group"))
        if cu_seqlens is None:
            hidden = self._padded_hidden_states(input_ids, attention_mask)
        elif self._packing_error is not None:
            raise ValueError(self._packing_error)
        else:
            hidden = _packed_hidden_states(self.model, input_ids, cu_seqlens)
        weight, given["bias"], given["lora"] = head_of(self.model, hidden, given.get("group"))
        rule = LogitRule.of(self.model.config, 1.0)
        given |= {"softcap": rule.softcap, "temperature": given.get("temperature", 1.0) * rule.temperature}
        if mode == "loss":
            tokens: Any = (target_ids, old_logprobs, advantages)
            out: Any = linear_dapo_loss(hidden, weight, *tokens, objective=self.objective, **given)
            if reads_values:  # after the loss, which has checked shapes and dtypes
                _check_targets(input_ids, target_ids, given.get("mask"), attention_mask, cu_seqlens)
        else:
            given.pop("cu_seqlens", None)
            out = linear_token_logprobs(hidden, weight, target_ids, **given)
        if reads_values:
            self._modes_checked.add(mode)
        return out

    def _reads_values(self, input_ids: Tensor, mode: str) -> bool:
        """Return whether this call checks values of its tensors. On a GPU only the first one of each mode waits."""
        if torch.compiler.is_compiling():
            return False
        return readable(input_ids) or (mode not in self._modes_checked and may_wait(None))

    @torch.compiler.assume_constant_result
    def _check_architecture(self, group: Any) -> None:
        """Run the model on a few tokens in the first call.

        Not before, because FSDP gathers the weights only in a call. In the first call whatever its layout, because
        ranks that share weights must run the model equally often.
        """
        if self._is_checked:
            return
        model, name = self.model, type(_unwrapped(self.model)).__name__
        device = model.get_output_embeddings().weight.device
        config = _unwrapped(model).config.get_text_config(decoder=True)
        vocab_size, layers = config.vocab_size, getattr(config, "layer_types", None) or ()
        # MiniMax M3 compares positions in the batch with position_ids, which a few tokens, one block, do not show.
        is_sparse = "minimax_m3_sparse" in layers
        ids = torch.arange(vocab_size)[None, :9].to(device)

        def hidden_of(packed_ids: Tensor, lengths: list[int]) -> Tensor:
            packed_ids = packed_ids.to(device)
            if len(lengths) == 1:
                return self._padded_hidden_states(packed_ids[None])[0]
            return _packed_hidden_states(model, packed_ids, torch.tensor([0, *accumulate(lengths)], device=device))

        def rows_of(padded_ids: Tensor, mask: Tensor) -> Tensor:
            return self._padded_hidden_states(padded_ids.to(device), mask.to(device))

        with undisturbed(model):
            hidden = self._padded_hidden_states(ids)
            check_logits(model, hidden, lambda: model(input_ids=ids, use_cache=False).logits, group)
            if not is_causal(hidden_of, vocab_size):
                raise ValueError(f"PolicyLoss: {name} is not causal: tokens attend to later ones")
            self._packing_error = _error_unless(
                lambda: not is_sparse and is_packable(hidden_of, vocab_size),
                f"{name} does not keep packed sequences apart; pad them",
                f"{name} cannot run packed sequences ({{}}); pad them",
            )
            self._left_padding_error = _error_unless(
                lambda: not is_sparse and ignores_left_padding(rows_of, vocab_size),
                f"{name} does not ignore left padding; pad right",
                f"{name} cannot run batches with left padding ({{}}); pad right",
            )
        self._is_checked = True

    def _padded_hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the last hidden states, [B, L, H]."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if attention_mask is not None and self._left_padding_error is not None:  # few models: waits for the device
            if (attention_mask[:, :1] < attention_mask).any():
                raise ValueError(self._left_padding_error)
        elif attention_mask is not None and self._takes_positions:
            inputs["position_ids"] = ((attention_mask != 0).cumsum(-1) - 1).clamp(min=0)
        hidden: Tensor = _unwrapped(self.model).base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _check_call(self, mode: str, old_logprobs: Any, advantages: Any, options: Mapping[str, Any]) -> None:
        _check_options(options)
        refuse_unknown("PolicyLoss.forward", [name for name in options if name not in _NAMES])
        if mode not in ("loss", "logprobs"):
            raise ValueError(f"PolicyLoss: mode must be 'loss' or 'logprobs', got {mode!r}")
        if mode == "logprobs" and (old_logprobs is not None or advantages is not None):
            raise ValueError("PolicyLoss: mode='logprobs' is not supported with old_logprobs and advantages: omit them")
        exact = {name: value for name, value in options.items() if name not in _MAY_BE_ROUNDED}
        check_not_rounded("PolicyLoss", old_logprobs=old_logprobs, advantages=advantages, **exact)


def _check_ids(input_ids: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    check_tensor("PolicyLoss", "input_ids", input_ids, "a tensor [B, L] or [T]")
    if cu_seqlens is not None:
        check_tensor("PolicyLoss", "cu_seqlens", cu_seqlens, "an int32 tensor [S+1]")
    if input_ids.dim() != (2 if cu_seqlens is None else 1) or (cu_seqlens is not None and attention_mask is not None):
        given = [n for n, x in (("attention_mask", attention_mask), ("cu_seqlens", cu_seqlens)) if x is not None]
        raise ValueError(
            "PolicyLoss: input_ids must be padded [B, L], with or without attention_mask, or packed [T] with "
            f"cu_seqlens; got {list(input_ids.shape)} with {' and '.join(given) or 'neither'}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"PolicyLoss: attention_mask must be {list(input_ids.shape)}, like input_ids, got "
            f"{list(attention_mask.shape)}. Shift it with input_ids: attention_mask[:, :-1]"
        )


def _check_attention_mask(attention_mask: Tensor) -> None:
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            "PolicyLoss: attention_mask must be bool, or 0 and 1, got other values. Pass several sequences in a row as "
            "packed [T] tensors with cu_seqlens"
        )


def _check_targets(
    input_ids: Tensor,
    target_ids: Tensor,
    mask: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise an error if padding trains, or if the model learns to repeat its input: at a ratio of 1, no metric shows
    either.
    """
    if target_ids.shape != input_ids.shape:  # sequence_parallel
        return
    live = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    if attention_mask is not None and bool((live & (attention_mask == 0)).any()):
        raise ValueError(
            "PolicyLoss: mask must be False where attention_mask is 0, which is padding. Pass the mask of the response "
            "tokens, shifted like target_ids"
        )
    # Between two live tokens there is no padding: the second one is the right target of the first.
    is_other = live & live.roll(-1, -1) & (target_ids != input_ids.roll(-1, -1))
    is_other[..., -1:] = False
    if cu_seqlens is not None:
        is_other[cu_seqlens[1:].long() - 1] = False
    if bool(is_other.any()) and bool(((target_ids == input_ids) | ~live).all()):
        raise ValueError(
            "PolicyLoss: target_ids must be shifted: the model at input_ids[t] predicts target_ids[t], got input_ids "
            "itself. Pass input_ids[:, :-1] with target_ids = input_ids[:, 1:], and shift the other tensors likewise"
        )


def _check_lengths(model: Any, input_ids: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise an error for sequences, padding included, that change the rotary frequencies of the whole batch."""
    fixed = fixed_frequencies(model.config)
    if fixed is None:  # nearly all models: no waiting for the device
        return
    longest = input_ids.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    if longest > fixed.longest:
        raise ValueError(
            f"PolicyLoss: input_ids must have sequences of at most {fixed.longest} tokens, got {longest}. With longer "
            f"ones the RoPE frequencies of {type(model).__name__} (rope_type {fixed.rope_type!r}) depend on the "
            "longest of a batch. Pass shorter sequences"
        )


def _error_unless(check: Callable[[], bool], failed: str, could_not_run: str) -> str | None:
    """Return the message of an error if a check fails or cannot run: some models have no ``position_ids``."""
    try:
        return None if check() else f"PolicyLoss: {failed}"
    except Exception as error:
        return f"PolicyLoss: {could_not_run.format(error)}"


def _packed_hidden_states(model: Any, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the last hidden states, [T, H]."""
    positions = torch.arange(len(input_ids), device=input_ids.device)
    sequence = torch.searchsorted(cu_seqlens[1:].to(torch.int64), positions, right=True)
    position_ids = (positions - cu_seqlens[sequence])[None]
    # Restarting positions keep sequences apart, but only without a cache.
    body = _unwrapped(model).base_model
    return body(input_ids=input_ids[None], position_ids=position_ids, use_cache=False).last_hidden_state[0]


def _unwrapped(model: Any) -> Any:
    """Return the causal language model inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_model(model: Any) -> None:
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"PolicyLoss: model must be a PreTrainedModel or a PEFT model, got {type(model).__name__}. Wrap PolicyLoss "
            "itself, not its model. For another model, call linear_dapo_loss in the forward of your own module"
        )
    check_head(model)
    inner = _unwrapped(model)
    if inner.base_model is inner:
        raise ValueError(
            f"PolicyLoss: {type(inner).__name__} must name the model below its head (base_model_prefix); "
            "encoder-decoder models are not supported"
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            "PolicyLoss: PEFT's prompt learning is not supported: it works in a forward that is not called"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if name in options:
            raise ValueError(f"PolicyLoss: {name} must not be passed: {reason}")
    temperature = options.get("temperature", 1.0)
    if not (is_number(temperature) or isinstance(temperature, Tensor)):
        raise TypeError(f"PolicyLoss: temperature must be a number or a tensor, got {type(temperature).__name__}")
