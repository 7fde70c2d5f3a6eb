"""The inputs of a configuration: ordinary numbers, no denormals, no NaN, a known share of clipped tokens.

N tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.configs import Config
from benchmarks.formulas import Tokens

# Distinct random rows of logits; further rows repeat them, with other targets: random numbers are dear.
_DISTINCT_ROWS = 256
# Log-ratio of a token inside the clip range, and of one far outside: bfloat16 log-probs (spaced 0.06 near −11) must
# not push a token over the edge, or eager in bfloat16 would be a different computation.
_INSIDE, _OUTSIDE = 0.05, 0.6
_BLOCK_BYTES = 128 * 2**20


@dataclass
class Problem:
    """Inputs of one configuration.

    Attributes:
        logits: [N, V], what contestants work on (and may consume); ``pristine`` is its untouched copy.
        padded: [1, N + 1, V], the memory of ``logits`` and a row after it, which some libraries want to see.
        hidden, weight: [N, H] and [V, H], at the hidden level.
        normalizer: [N] float32, log Σ exp of the logits, by blocks of eager PyTorch.
        exact: the same in float64, and entropies, once ``truth`` has found them. Problems of the same inputs share it.
    """

    config: Config
    tokens: Tokens
    normalizer: Tensor
    logits: Tensor | None = None
    pristine: Tensor | None = None
    padded: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    exact: dict[str, Tensor] = field(default_factory=dict)

    def take_logits(self) -> None:
        """Make the logits to work on, in the process that will, so that their pages come from its own allocator."""
        if self.pristine is not None and self.logits is None:
            n, vocab = self.pristine.shape
            self.padded = self.pristine.new_zeros(1, n + 1, vocab)
            self.logits = self.padded[0, :n]
            self.restore()

    def restore(self) -> None:
        """Restore consumed inputs. The caches are then in the same state before every contestant."""
        if self.logits is not None and self.pristine is not None:
            self.logits.copy_(self.pristine)

    def head(self) -> tuple[Tensor, Tensor]:
        """Return hidden states [N, H] and head [V, H]."""
        if self.hidden is None or self.weight is None:
            raise ValueError(f"{self.config.name} starts from logits: it has no hidden states")
        return self.hidden, self.weight

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the differentiable inputs as fresh leaves."""
        given = self.head() if self.logits is None else (self.logits,)
        return tuple(x.detach().requires_grad_(self.config.mode == "train") for x in given)

    def bytes_beyond_inputs(self, tensors: tuple[Tensor, ...]) -> int:
        """Return the bytes of the tensors that are not inputs overwritten."""
        inputs = {x.data_ptr() for x in self.inputs()}
        return sum(x.nbytes for x in tensors if x.data_ptr() not in inputs)

    def live_rows(self) -> list[slice]:
        """Return the rows that train: the first part of every sequence."""
        length = self.config.n_tokens // self.config.n_sequences
        live = _live_length(self.config)
        return [slice(start, start + live) for start in range(0, self.config.n_tokens, length)]

    def row_blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits by blocks of rows, in ``dtype``; from hidden states they are computed in that dtype."""
        size = max(1, _BLOCK_BYTES // (self.config.vocab * dtype.itemsize))
        for start in range(0, self.config.n_tokens, size):
            rows = slice(start, min(start + size, self.config.n_tokens))
            yield rows, self.logits_of(rows, dtype)

    def logits_of(self, rows: slice | Tensor, dtype: torch.dtype, columns: Tensor | None = None) -> Tensor:
        """Return the logits of some rows (and columns), in ``dtype``."""
        if self.pristine is not None:
            picked = self.pristine[rows]
            return (picked if columns is None else picked[:, columns]).to(dtype)
        hidden, weight = self.head()
        weight = weight if columns is None else weight[columns]
        if dtype == torch.float32:
            return (hidden[rows] @ weight.t()).float()
        return hidden[rows].to(dtype) @ weight.to(dtype).t()


def build(config: Config, seed: int = 0, logits: bool = True) -> Problem:
    """Make the inputs, on one thread if the process will fork. ``logits=False``: ``take_logits`` comes later."""
    if config.n_tokens % config.n_sequences:
        raise ValueError(f"n_sequences must divide n_tokens={config.n_tokens}, got {config.n_sequences}")
    device = config.tensor_device
    base, state = _base(config.level, config.dtype, config.n_tokens, config.vocab, config.hidden, device, seed)
    generator = seeded(torch.device(device), seed)
    if generator is not None and state is not None:
        generator.set_state(state)
    exact_logprobs = base.tokens.old_logprobs
    tokens = Tokens(base.tokens.target_ids, exact_logprobs, _advantages(config), _responses(config), config.n_sequences)
    ratios = _log_ratios(config, tokens, generator)
    problem = replace(base, config=config, tokens=tokens)
    problem.tokens = tokens._replace(old_logprobs=(exact_logprobs - ratios).clamp(max=0.0))
    if logits:
        problem.take_logits()
    return problem


@functools.lru_cache(maxsize=1)
def _base(
    level: str, dtype: str, n: int, vocab: int, width: int, device_name: str, seed: int
) -> tuple[Problem, Tensor | None]:
    """Make what problems of these sizes share, with the policy's log-probs as old ones, and the generator's state."""
    config = Config(level, dtype, n, vocab, width, device=device_name)
    device = torch.device(device_name)
    generator = seeded(device, seed)
    ids = torch.randint(vocab, (n,), generator=generator, device=device)
    zeros = torch.zeros(n, device=device)
    problem = Problem(config, Tokens(ids, zeros, zeros, zeros > 0, 1), normalizer=torch.empty(n, device=device))
    if level == "logits":
        distinct = torch.randn(min(n, _DISTINCT_ROWS), vocab, generator=generator, device=device).mul_(2.0)
        problem.pristine = torch.empty(n, vocab, dtype=config.torch_dtype, device=device)
        for part in problem.pristine.split(_DISTINCT_ROWS):
            part.copy_(distinct[: part.shape[0]])
    else:
        # Entries of spread H^-¼ times √2 give logits of spread 2.
        scale = (2.0**0.5) * width**-0.25
        for name, length in (("hidden", n), ("weight", vocab)):
            values = torch.randn(length, width, generator=generator, device=device).mul_(scale)
            setattr(problem, name, values.to(config.torch_dtype))
    logprobs = torch.empty(n, device=device)
    for rows, logits in problem.row_blocks(torch.float32):
        problem.normalizer[rows] = logits.logsumexp(1)
        logprobs[rows] = logits.gather(1, ids[rows, None]).squeeze(1) - problem.normalizer[rows]
    problem.tokens = problem.tokens._replace(old_logprobs=logprobs)
    return problem, None if generator is None else generator.get_state()


def seeded(device: torch.device, seed: int) -> torch.Generator | None:
    """Return a generator; None on "meta", where nothing is drawn."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def _advantages(config: Config) -> Tensor:
    """Return ±1 by sequence, alternating, with a little spread."""
    i = torch.arange(config.n_sequences, device=config.tensor_device)
    per_sequence = (1.0 + 0.1 * i) * (1 - 2 * (i % 2))
    return per_sequence.repeat_interleave(config.n_tokens // config.n_sequences)


def _live_length(config: Config) -> int:
    return max(1, round(config.live * (config.n_tokens // config.n_sequences)))


def _responses(config: Config) -> Tensor:
    """Return which tokens are not padding: the first ``live`` of every sequence, at least one token."""
    length = config.n_tokens // config.n_sequences
    return torch.arange(config.n_tokens, device=config.tensor_device) % length < _live_length(config)


def _log_ratios(config: Config, tokens: Tokens, generator: torch.Generator | None) -> Tensor:
    """Return ratios inside the clip range, except those of a random share, at least one token, which are far outside on
    the side where the advantage clips.
    """
    n, device = config.n_tokens, config.tensor_device
    inside = _INSIDE * (2 * torch.rand(n, generator=generator, device=device) - 1)
    if config.clipped == 0:
        return inside
    outside = torch.zeros(n, dtype=torch.bool, device=device)
    outside[torch.randperm(n, generator=generator, device=device)[: max(1, round(config.clipped * n))]] = True
    return torch.where(outside, _OUTSIDE * tokens.advantages.sign(), inside)
