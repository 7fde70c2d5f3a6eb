"""The inputs of a configuration: ordinary numbers, no denormals, no NaN, and what follows from them in float64.

N tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.configs import Config
from benchmarks.formulas import Tokens

# Distinct random rows of logits; further rows repeat them, with other targets: random numbers are dear.
_DISTINCT_ROWS = 256
# Largest log-ratio of a token, inside the clip range: bfloat16 log-probs (spaced 0.06 near −11) must not push a token
# over the edge, or eager in bfloat16 would be a different computation.
_LOG_RATIO = 0.05
_BLOCK_BYTES = 128 * 2**20


class Exact(NamedTuple):
    """Each [N], float64: log Σ exp of the logits, the log-probs of the targets, the entropies."""

    normalizer: Tensor
    logprobs: Tensor
    entropy: Tensor


@dataclass
class Problem:
    """Inputs of one configuration.

    Attributes:
        logits: [N, V], what contestants work on (and may consume); ``pristine`` is its untouched copy.
        padded: [1, N + 1, V], the memory of ``logits`` and a row after it, which some libraries want to see.
        hidden, weight: [N, H] and [V, H], at the hidden level.
    """

    config: Config
    tokens: Tokens
    exact: Exact
    logits: Tensor | None = None
    pristine: Tensor | None = None
    padded: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None

    def restore(self) -> None:
        """Restore consumed inputs. The caches are then in the same state before every contestant.

        The logits to work on are made by the first call, so that their pages come from the allocator of its process.
        """
        if self.pristine is not None:
            if self.logits is None:
                n, vocab = self.pristine.shape
                self.padded = self.pristine.new_zeros(1, n + 1, vocab)
                self.logits = self.padded[0, :n]
            self.logits.copy_(self.pristine)

    def head(self) -> tuple[Tensor, Tensor]:
        """Return hidden states [N, H] and head [V, H]."""
        assert self.hidden is not None
        assert self.weight is not None
        return self.hidden, self.weight

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the differentiable inputs as fresh leaves."""
        given = self.head() if self.logits is None else (self.logits,)
        return tuple(x.detach().requires_grad_(self.config.mode == "train") for x in given)

    def bytes_beyond_inputs(self, tensors: tuple[Tensor, ...]) -> int:
        """Return the bytes of the tensors that are not inputs overwritten."""
        inputs = {x.data_ptr() for x in self.inputs()}
        return sum(x.nbytes for x in tensors if x.data_ptr() not in inputs)

    def exact_logits(self, rows: slice | Tensor, columns: slice | Tensor = slice(None)) -> Tensor:
        """Return the float64 logits of some rows and columns."""
        if self.pristine is not None:
            return self.pristine[rows][:, columns].double()
        hidden, weight = self.head()
        return hidden[rows].double() @ weight[columns].double().t()


def build(config: Config, seed: int = 0) -> Problem:
    """Make the inputs, on one thread if the process will fork."""
    base = _base(config.level, config.dtype, config.n_tokens, config.vocab, config.hidden, config.tensor_device, seed)
    length, device = config.n_tokens // config.n_sequences, config.tensor_device
    sequences = torch.arange(config.n_sequences, device=device)
    advantages = (1.0 + 0.1 * sequences) * (1 - 2 * (sequences % 2))  # ±1, alternating, with a little spread
    # The first tokens of every sequence train, at least one.
    mask = torch.arange(config.n_tokens, device=device) % length < max(1, round(config.live * length))
    ratios = _LOG_RATIO * (2 * torch.rand(config.n_tokens, generator=seeded(device, seed), device=device) - 1)
    tokens = base.tokens._replace(
        old_logprobs=(base.exact.logprobs.float() - ratios).clamp(max=0.0),
        advantages=advantages.repeat_interleave(length),
        mask=mask,
        n_sequences=config.n_sequences,
    )
    return replace(base, config=config, tokens=tokens)


@functools.lru_cache(maxsize=1)
def _base(level: str, dtype: str, n: int, vocab: int, width: int, device: str, seed: int) -> Problem:
    """Make what problems of these sizes share."""
    config = Config(level, dtype, n, vocab, width, device=device)
    generator = seeded(device, seed)
    ids = torch.randint(vocab, (n,), generator=generator, device=device)
    zeros = torch.zeros(n, device=device)
    exact = Exact(*(torch.empty(n, dtype=torch.float64, device=device) for _ in Exact._fields))
    problem = Problem(config, Tokens(ids, zeros, zeros, zeros > 0, 1), exact)
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
    for rows, logits in _row_blocks(problem):
        exact.normalizer[rows] = logits.logsumexp(1)
        exact.logprobs[rows] = logits.gather(1, ids[rows, None]).squeeze(1) - exact.normalizer[rows]
        exact.entropy[rows] = exact.normalizer[rows] - (logits.softmax(1) * logits).sum(1)
    return problem


def _row_blocks(problem: Problem) -> Iterator[tuple[slice, Tensor]]:
    """Yield the float64 logits by blocks of rows."""
    wide = problem if problem.weight is None else replace(problem, weight=problem.weight.double())
    for rows in torch.arange(problem.config.n_tokens).split(max(1, _BLOCK_BYTES // (8 * problem.config.vocab))):
        block = slice(int(rows[0]), int(rows[-1]) + 1)
        yield block, wide.exact_logits(block)


def seeded(device: str, seed: int) -> torch.Generator | None:
    """Return a generator; None on "meta", where nothing is drawn."""
    return None if device == "meta" else torch.Generator(device).manual_seed(seed)
