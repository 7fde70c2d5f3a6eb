"""The engine that needs nothing extra: a transformers model, decoded in batches with a key-value cache.

Prompts are prefilled once however many samples they get; a row that has ended leaves the batch. Legend: R
rows (one completion each), P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from dapo_runner.policy.model import load_model
from dapo_runner.rollout.cache import growing_cache
from dapo_runner.rollout.engine import (
    EngineContext,
    Groups,
    RolloutEngine,
    copy_weights,
    sampling_of_each,
    stop_token_ids,
)
from dapo_runner.rollout.stopping import StopStrings
from dapo_runner.types import (
    DEFAULT_OPTIONS,
    CallOptions,
    Completion,
    FinishReason,
    Prompt,
    SamplingParams,
    TruncatedSupport,
)

# Rows that have ended are dropped from the batch when this share of it is dead: dropping copies the cache.
DEAD_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: int
    sample: int
    sampling: SamplingParams


class HFEngine(RolloutEngine):
    """A rollout engine over any transformers causal language model, on any device."""

    @classmethod
    def load(cls, context: EngineContext) -> RolloutEngine:
        config = context.config
        model = load_model(context.source, config.model, context.device, "sdpa")
        return cls(model, context.tokenizer, config.rollout.max_batch_sequences)

    def __init__(self, model: Any, tokenizer: Any, max_batch_sequences: int = 256) -> None:
        """``model`` becomes the engine's own: ``update_weights`` writes into it. Batches hold up to
        ``max_batch_sequences`` completions."""
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_sequences = max_batch_sequences
        self.stop_ids = stop_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(self.model, weights)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Groups:
        """See ``RolloutEngine.generate``.

        Every completion draws with its own dice, made from its seed, its prompt's place in the call and its
        own place in the group: a completion does not depend on what it was batched with, but for the rounding
        of the model.
        """
        each = sampling_of_each(prompts, sampling)
        results: list[list[Completion]] = [[] for _ in prompts]
        for rows in self._batches(prompts, each):
            for row, completion in zip(rows, self._decode(prompts, rows), strict=True):
                results[row.prompt].append(completion)
        return results

    def _batches(self, prompts: Sequence[Prompt], each: Sequence[SamplingParams]) -> Iterator[list[_Row]]:
        """Rows in batches, prompts of like length together so that little is padded."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        rows = [_Row(index, sample, each[index]) for index in order for sample in range(each[index].n)]
        for start in range(0, len(rows), self.max_batch_sequences):
            yield rows[start : start + self.max_batch_sequences]

    def _decode(self, prompts: Sequence[Prompt], rows: list[_Row]) -> list[Completion]:
        """One completion for each row, all decoded side by side until the last of them has ended."""
        device = self.model.device
        sampler = _TokenSampler([row.sampling for row in rows], _dice(rows), device)
        responses = _Responses([row.sampling.max_tokens for row in rows], self.stop_ids, device)
        strings = StopStrings([row.sampling.stop for row in rows], self.tokenizer)
        logits, lines = self._prefill(prompts, rows)
        for step in count():
            tokens, logprobs, kept = sampler.sample(logits, lines.rows, step)
            responses.append(step, lines.rows, tokens, logprobs, kept)
            if strings:
                responses.stop(strings.completed(responses.lengths == step + 1, responses.tokens[:, : step + 1]))
            running = responses.running[lines.rows]
            n_running = int(running.sum())
            if n_running == 0:
                break
            if n_running <= (1 - DEAD_SHARE) * running.numel():
                left = running.nonzero().squeeze(1)
                lines, tokens = lines.select(left), tokens[left]
            lines = lines.longer()
            logits = self._forward(tokens[:, None], lines.mask, lines.cache)
        return self._completions(responses)

    def _prefill(self, prompts: Sequence[Prompt], rows: list[_Row]) -> tuple[Tensor, _Lines]:
        """Logits of the first response token [R, V], and a line for each row. A prompt is computed once, however many
        rows it has, left-padded to the longest.
        """
        device, unique = self.model.device, sorted({row.prompt for row in rows})
        width = max(len(prompts[index].token_ids) for index in unique)
        ids = torch.zeros(len(unique), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for line, index in enumerate(unique):
            tokens = prompts[index].token_ids
            ids[line, width - len(tokens) :] = torch.tensor(tokens)
            mask[line, width - len(tokens) :] = 1
        mask, cache = mask.to(device), growing_cache(self.model.config)
        logits = self._forward(ids.to(device), mask, cache)
        line_of = {prompt: line for line, prompt in enumerate(unique)}
        spread = torch.tensor([line_of[row.prompt] for row in rows], device=device)
        cache.batch_select_indices(spread)
        return logits[spread], _Lines(torch.arange(len(rows), device=device), mask[spread], cache)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits [R, V] after the last of ``ids`` [R, P or 1]; ``mask`` covers the cache and ``ids``."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _completions(self, responses: _Responses) -> list[Completion]:
        tokens, logprobs = responses.tokens.cpu(), responses.logprobs.cpu()
        lengths, stopped = responses.lengths.tolist(), responses.stopped.tolist()
        said = [tokens[row, :length].clone() for row, length in enumerate(lengths)]
        texts = self.tokenizer.batch_decode(said, skip_special_tokens=True)
        reasons: list[FinishReason] = ["stop" if ended else "length" for ended in stopped]
        kept = responses.kept(lengths)
        return [
            Completion(said[row], logprobs[row, : lengths[row]].clone(), reasons[row], texts[row], support=kept[row])
            for row in range(len(said))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """What the model is given, a line for each row that still runs and for few that do not.

    rows int64 [B]: the row that a line decodes. mask int64 [B, positions]: 0 on padding. cache: keys and values.
    """

    rows: Tensor
    mask: Tensor
    cache: Any

    def select(self, kept: Tensor) -> _Lines:
        """Only the lines ``kept``, int64; the cache is changed in place."""
        self.cache.batch_select_indices(kept)
        return _Lines(self.rows[kept], self.mask[kept], self.cache)

    def longer(self) -> _Lines:
        """With room for one more token each."""
        return _Lines(self.rows, torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1), self.cache)


class _Responses:
    """What the rows have said so far: tokens, logprobs [R, steps]; lengths, limits, stopped, running [R]."""

    def __init__(self, limits: Sequence[int], stop_ids: list[int], device: torch.device) -> None:
        n_rows, n_steps = len(limits), max(limits)
        self.limits = torch.tensor(limits, device=device)
        self.stop_ids = torch.tensor(stop_ids, device=device)
        self.tokens = torch.zeros(n_rows, n_steps, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(n_rows, n_steps, device=device)
        self.lengths = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(n_rows, dtype=torch.bool, device=device)
        self.running = torch.ones(n_rows, dtype=torch.bool, device=device)
        # Of every step the row and the id of each kept token, where any were asked for.
        self.kept_rows: list[Tensor] = []
        self.kept_ids: list[Tensor] = []

    def append(self, step: int, rows: Tensor, tokens: Tensor, logprobs: Tensor, kept: Tensor | None = None) -> None:
        """The next token [B] of ``rows`` [B], sampled from ``kept`` bool [B, V]; one that has ended says no more."""
        running = self.running[rows]
        rows, tokens = rows[running], tokens[running]
        if kept is not None:
            kept = kept[running]
            lines, ids = (kept & ~kept.all(-1, keepdim=True)).nonzero().unbind(-1)
            self.kept_rows.append(rows[lines].cpu())
            self.kept_ids.append(ids.to(torch.int32).cpu())
        self.tokens[rows, step] = tokens
        self.logprobs[rows, step] = logprobs[running]
        self.lengths[rows] = step + 1
        self.stopped[rows] = torch.isin(tokens, self.stop_ids)
        self.running[rows] = ~self.stopped[rows] & (self.limits[rows] > step + 1)

    def stop(self, rows: Tensor) -> None:
        """End the responses of ``rows``, int64, with what they have."""
        self.stopped[rows] = True
        self.running[rows] = False

    def kept(self, lengths: Sequence[int]) -> list[TruncatedSupport | None]:
        """Of each row, of as many steps as it is long."""
        n_rows = len(lengths)
        if not self.kept_rows:
            return [None] * n_rows
        ids, of_rows = torch.cat(self.kept_ids), torch.cat(self.kept_rows)
        counts = torch.stack([rows.bincount(minlength=n_rows) for rows in self.kept_rows], dim=1).to(torch.int32)
        parts = ids[of_rows.argsort(stable=True)].split(counts.sum(1).tolist())
        return [
            TruncatedSupport(parts[row].clone(), counts[row, :length].clone()) for row, length in enumerate(lengths)
        ]


class _TokenSampler:
    """Draws tokens by inverting the cumulative distribution at one uniform number per row and step."""

    def __init__(self, sampling: Sequence[SamplingParams], dice: Tensor, device: torch.device) -> None:
        self.dice = dice.to(device)
        temperature = torch.tensor([item.temperature for item in sampling], device=device)
        self.greedy = temperature == 0
        # Greedy rows report their log-probs at temperature 1.
        self.temperature = torch.where(self.greedy, 1.0, temperature)[:, None]
        self.top_p = torch.tensor([item.top_p for item in sampling], device=device)[:, None]
        n_tokens = [item.top_k or torch.iinfo(torch.int64).max for item in sampling]
        self.top_k = torch.tensor(n_tokens, device=device)[:, None]
        self.min_p = torch.tensor([item.min_p for item in sampling], device=device)[:, None]
        self.any_greedy = bool(self.greedy.any())
        self.any_top_p = bool((self.top_p < 1).any())
        self.any_cut = any(item.top_k is not None or item.min_p > 0 for item in sampling)
        self.asked = torch.tensor([item.sampling_mask for item in sampling], device=device)
        self.any_asked = bool(self.asked.any())

    def sample(self, logits: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens int64 [R], their float32 log-probs [R] and what they were sampled from, bool [R, V].

        The log-probs are the policy's own, temperature included, top_p, top_k and min_p not. Rows that ask what was
        left to sample from have those of that part; where none asks, there is no third.
        """
        logprobs = torch.log_softmax(logits.float() / self.temperature[rows], dim=-1)
        probs = logprobs.exp()
        if self.any_cut:
            probs = _likeliest(probs, self.top_k[rows], self.min_p[rows])
        if self.any_top_p:
            probs = _nucleus(probs, self.top_p[rows])
        cdf = probs.cumsum(dim=-1)
        total = cdf[:, -1:]
        # Below the total, so that rounding cannot point past the last token that has any probability.
        target = torch.minimum(self.dice[rows, step, None] * total, torch.nextafter(total, total.new_zeros(())))
        tokens = torch.searchsorted(cdf, target, right=True)
        if self.any_greedy:
            tokens = torch.where(self.greedy[rows, None], logprobs.argmax(dim=-1, keepdim=True), tokens)
        kept = None
        if self.any_asked:
            kept = (probs > 0) | ~self.asked[rows, None]
            logprobs = logprobs - logprobs.masked_fill(~kept, -torch.inf).logsumexp(dim=-1, keepdim=True)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0], kept


def _likeliest(probs: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """What is left of ``probs``, summing to 1 again: tokens with at least ``min_p`` [R, 1] of the likeliest one's, and
    of these the ``top_k`` [R, 1] likeliest, those as likely as the last of them included.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    last = ordered.gather(-1, top_k.clamp(max=probs.shape[-1]) - 1)
    probs = probs.masked_fill(probs < torch.maximum(last, min_p * ordered[:, :1]), 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the fewest tokens whose probabilities reach ``top_p`` together, the one that crosses it
    included.
    """
    ordered, index = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(before >= top_p, 0.0))


def _dice(rows: list[_Row]) -> Tensor:
    """Uniform numbers in [0, 1), [R, longest limit]."""
    dice = torch.zeros(len(rows), max(row.sampling.max_tokens for row in rows))
    generator = torch.Generator()
    for line, row in zip(dice, rows, strict=True):
        # A hash, not a sum: prompt 1 sample 0 of one seed must not throw the dice of prompt 0 sample 1 of the
        # next.
        place = row.prompt if row.sampling.index is None else row.sampling.index
        name = f"{row.sampling.seed}:{place}:{row.sample}".encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1)
        line[: row.sampling.max_tokens] = torch.rand(row.sampling.max_tokens, generator=generator)
    return dice
