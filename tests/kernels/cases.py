"""Problems for the kernels and their float64 solutions.

Legend: T tokens, V vocabulary, H hidden, S sequences, B x L padded. A `Case` is packed (flat) by construction;
`padded` and `pad` turn flat tensors into ``[B, L]`` ones. Policy ratios are drawn away from the clip edges, so that
the rounding of the logits never decides which branch a token takes; the edges have tests of their own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from oracle import Options, Span, TokenInputs, batch_loss, row_entropy, row_log_softmax
from torch import Tensor

from dapo_kernels import LoraFactors

# log(0.8) = -0.223, log(1.2) = 0.182, log(1.28) = 0.247, log(2) = 0.693, log(3) = 1.099
LOG_RATIOS = (-1.2, -0.5, -0.35, -0.1, 0.0, 0.03, 0.1, 0.215, 0.4, 0.55, 0.9, 1.3)
# Logits that a half-precision GEMM has rounded are off by some hundredths: wider margins.
WIDE_LOG_RATIOS = (-1.2, -0.45, -0.05, 0.0, 0.03, 0.05, 0.38, 0.9, 1.3)

HEAD = ("weight", "bias", "lora_a", "lora_b")  # leaves without an axis of tokens
LORA_SCALE = 1.5
LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
# Eager PyTorch keeps logits in their dtype and does the softmax in float32.
MATH_DTYPE = {dtype: torch.promote_types(dtype, torch.float32) for dtype in (torch.float64, *LOW_PRECISION)}


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """float64 runs on the reference backend only."""
    return (torch.float64, *LOW_PRECISION) if backend == "torch" else LOW_PRECISION


@dataclass
class Case:
    """Per-token inputs of T tokens in S sequences; float32 except ids and mask."""

    target_ids: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logprobs: Tensor
    importance_weights: Tensor
    lengths: tuple[int, ...]
    leaves: dict[str, Tensor]
    temperature: float | Tensor = 1.0
    softcap: float | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 ``[S+1]``."""
        return torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int32)

    @property
    def spans(self) -> list[Span]:
        edges = self.cu_seqlens.tolist()
        return list(itertools.pairwise(edges))

    def fresh(self) -> dict[str, Tensor]:
        """Copies of the leaves, all requiring a gradient."""
        return {name: leaf.detach().clone().requires_grad_() for name, leaf in self.leaves.items()}

    def tensors(self, *names: str) -> dict[str, Any]:
        """The named keyword tensors of this case, for a call."""
        return {name: getattr(self, name) for name in names}


def logits_of(leaves: dict[str, Tensor], softcap: float | None) -> Tensor:
    """``[T, V]`` logits: given, or hidden @ weight.T + LoRA factors + bias, then softcap * tanh(. / softcap)."""
    if "logits" in leaves:
        return leaves["logits"]
    logits = leaves["hidden"] @ leaves["weight"].T
    if "lora_a" in leaves:
        logits = logits + LORA_SCALE * (leaves["hidden"] @ leaves["lora_a"].T @ leaves["lora_b"].T)
    if "bias" in leaves:
        logits = logits + leaves["bias"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def _case_of(
    leaves: dict[str, Tensor], lengths: Sequence[int], generator: torch.Generator, dead: float, mask: Tensor | None,
    temperature: float | Tensor, softcap: float | None = None,
) -> Case:  # fmt: skip
    """Targets drawn from the policy, old log-probs at chosen ratios, a mask with `dead` of the tokens off."""
    n_tokens = sum(lengths)
    logits = logits_of({name: leaf.double() for name, leaf in leaves.items()}, softcap)
    per_token = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)
    logp = torch.log_softmax(logits / per_token, dim=-1)
    target_ids = torch.multinomial(logp.exp(), 1, generator=generator).reshape(n_tokens)
    picked = logp.gather(1, target_ids[:, None])[:, 0]

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n_tokens, generator=generator, dtype=torch.float64)

    ratios = LOG_RATIOS if "logits" in leaves else WIDE_LOG_RATIOS
    choice = torch.randint(len(ratios), (n_tokens,), generator=generator)
    log_ratio = torch.tensor(ratios).double()[choice] + uniform(0, 0.01)
    log_ratio = torch.where(picked > log_ratio, -log_ratio, log_ratio)  # no log-prob is above 0
    ref_logprobs = (picked + uniform(-0.7, 0.7)).clamp(max=0.0)
    sign = torch.randint(2, (n_tokens,), generator=generator) * 2 - 1
    return Case(
        target_ids=target_ids,
        old_logprobs=(picked - log_ratio).float(),
        ref_logprobs=ref_logprobs.float(),
        advantages=(sign * uniform(0.2, 2.0)).float(),
        importance_weights=uniform(0.3, 2.0).float(),
        mask=torch.rand(n_tokens, generator=generator) >= dead if mask is None else mask,
        lengths=tuple(lengths),
        leaves=leaves,
        temperature=temperature,
        softcap=softcap,
    )


def logits_case(
    vocab: int = 31,
    lengths: Sequence[int] = (5, 1, 9, 4),
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sharpness: float = 2.0,
    dead: float = 0.3,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Case:
    """A packed problem at the logits level: ``logits`` is ``[T, V]`` in `dtype`, normal with std `sharpness`."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(sum(lengths), vocab, generator=generator) * sharpness).to(dtype)
    return _case_of({"logits": logits}, lengths, generator, dead, mask, temperature)


def linear_case(
    vocab: int = 31,
    hidden_size: int = 8,
    lengths: Sequence[int] = (5, 1, 9, 4),
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bias: bool = False,
    softcap: float | None = None,
    dead: float = 0.3,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    rank: int = 0,
) -> Case:
    """The same from hidden states ``[T, H]`` and a head ``[V, H]`` (and ``[V]`` bias), all in `dtype`. ``rank``: of
    LoRA factors ``[rank, H]`` and ``[V, rank]``.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    scale = hidden_size**-0.5
    leaves = {"hidden": normal(sum(lengths), hidden_size), "weight": normal(vocab, hidden_size, scale=2 * scale)}
    if bias:
        leaves["bias"] = normal(vocab)
    if rank:
        leaves["lora_a"] = normal(rank, hidden_size, scale=scale)
        leaves["lora_b"] = normal(vocab, rank, scale=rank**-0.5)
    return _case_of(leaves, lengths, generator, dead, mask, temperature, softcap)


@dataclass
class Solution:
    """Loss, gradients by leaf, per-token log-probs and entropies (0 on dead tokens), metric sums; and what rounding
    errors of gradients are relative to: the slopes [T] by a log-prob and by an entropy."""

    loss: Tensor
    grads: dict[str, Tensor]
    logprobs: Tensor
    entropy: Tensor
    metrics: dict[str, float]
    slopes: Tensor


def rows_of(
    case: Case, o: Options, dtype: torch.dtype = torch.float64, *, on_policy: bool = False, weighted: bool = False,
    use_mask: bool = True, groups: Sequence[int] | None = None,
) -> tuple[dict[str, Tensor], TokenInputs]:  # fmt: skip
    """Leaves in `dtype`, and what the oracle reads: arithmetic in float32 at least, zeros on dead tokens."""
    math_dtype = MATH_DTYPE[dtype]
    leaves = {name: leaf.detach().to(dtype, copy=True).requires_grad_() for name, leaf in case.leaves.items()}
    live = [bool(m) for m in case.mask.tolist()] if use_mask else [True] * sum(case.lengths)
    rows = torch.tensor([t for t in range(len(live)) if live[t]], dtype=torch.int64)
    if "logprobs" in leaves:
        logprobs, entropy = leaves["logprobs"].to(math_dtype), leaves["entropy"].to(math_dtype)
    else:
        token_leaf = "logits" if "logits" in leaves else "hidden"
        logits = logits_of({**leaves, token_leaf: leaves[token_leaf][rows]}, case.softcap).to(math_dtype)
        tau = torch.as_tensor(case.temperature, dtype=math_dtype).expand(len(live))[rows]
        picked = row_log_softmax(logits, tau).gather(1, case.target_ids[rows, None])[:, 0]
        logprobs, entropy = (
            torch.zeros(len(live), dtype=math_dtype).index_put((rows,), values)
            for values in (picked, row_entropy(logits, tau))
        )
        logprobs.retain_grad()
        entropy.retain_grad()
    inputs = TokenInputs(
        logprobs,
        case.advantages.to(math_dtype),
        live,
        case.spans,
        old_logprobs=None if on_policy else case.old_logprobs.to(math_dtype),
        ref_logprobs=case.ref_logprobs.to(math_dtype) if o.kl_coef else None,
        importance_weights=case.importance_weights.to(math_dtype) if weighted else None,
        entropy=entropy,
        groups=groups,
    )
    return leaves, inputs


def solve(
    case: Case,
    o: Options,
    *,
    dtype: torch.dtype = torch.float64,
    denominator: float | None = None,
    grad_output: float = 1.0,
    selected: Iterable[int] | None = None,
    loss_of: Callable[[TokenInputs], Tensor] | None = None,
    **how: Any,
) -> Solution:
    """Autograd through the oracle (or through ``loss_of``): float64 is the truth, the case's own dtype is eager."""
    leaves, x = rows_of(case, o, dtype, **how)
    loss, metrics = batch_loss(x, o, denominator, selected) if loss_of is None else (loss_of(x), {})
    if loss.requires_grad:
        (loss * grad_output).backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    slopes = torch.zeros(len(x.live), dtype=torch.float64)
    for values in (x.logprobs, x.entropy):
        if loss.requires_grad and values.grad is not None:
            slopes = slopes + values.grad.double().abs()
    return Solution(loss.detach(), grads, x.logprobs.detach(), x.entropy.detach(), metrics, slopes)


PER_TOKEN = ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs", "importance_weights")


def part_of(case: Case, sequences: Sequence[int]) -> tuple[Case, Tensor]:
    """A case made of some of the sequences, in the given order; and the places of its tokens in the whole."""
    places = torch.cat([torch.arange(*case.spans[i]) for i in sequences])
    part = {name: getattr(case, name)[places] for name in PER_TOKEN}
    leaves = {k: v if k in HEAD else v[places] for k, v in case.leaves.items()}
    return replace(case, **part, lengths=tuple(case.lengths[i] for i in sequences), leaves=leaves), places


def page_code(marker: str) -> str:
    """The code of docs/objectives.md that stands behind a marker."""
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    code = re.search(rf"<!-- {marker} -->\n```python\n(.+?)```", page, re.DOTALL)
    return code[1]


def pad(flat: Tensor, lengths: Sequence[int], width: int, fill: float) -> Tensor:
    """``[T, ...]`` → ``[B, L, ...]``, sequences left-aligned, the rest filled."""
    out = torch.full((len(lengths), width, *flat.shape[1:]), fill, dtype=flat.dtype)
    start = 0
    for b, n in enumerate(lengths):
        out[b, :n] = flat[start : start + n]
        start += n
    return out


def unpad(padded: Tensor, lengths: Sequence[int]) -> Tensor:
    """The inverse of `pad`."""
    return torch.cat([padded[b, :n] for b, n in enumerate(lengths)])


def call_linear(
    fn: Callable[..., Any],
    case: Case,
    objective: str,
    *,
    needs: Sequence[str] = ("logits", "hidden", *HEAD),
    grad_output: float = 1.0,
    **kwargs: Any,
) -> tuple[Any, dict[str, Tensor | None]]:
    """Call a loss; only the leaves in `needs` require a gradient. Returns ``(out, gradients by leaf)``."""
    leaves = {name: leaf.requires_grad_(name in needs) for name, leaf in case.fresh().items()}
    given = {"old": case.old_logprobs, "advantages": case.advantages, "temperature": case.temperature, **leaves}
    if "hidden" in leaves:
        given["softcap"] = case.softcap
    if "lora_a" in leaves:
        given["lora"] = LoraFactors(given.pop("lora_a"), given.pop("lora_b"), LORA_SCALE)
    given |= kwargs
    out = fn(target_ids=case.target_ids, old_logprobs=given.pop("old"), objective=objective, **given)
    (out.loss * grad_output).backward()
    return out, {name: leaf.grad for name, leaf in leaves.items()}


def call_logits(fn: Callable[..., Any], case: Case, objective: str, **kwargs: Any) -> tuple[Any, Tensor]:
    """Call a loss from logits. Returns ``(out, logits gradient)``."""
    out, grads = call_linear(fn, case, objective, **kwargs)
    return out, grads["logits"]
