"""The engine that needs nothing extra: a transformers model, decoded in batches with a key-value cache.

Legend: R rows (one completion each), B rows that are still in the batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dapo_runner.config import Config
from dapo_runner.engines.engine import BatchCall, Groups, Note, OpenCall, RolloutEngine, copy_weights, stop_token_ids
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import load_model, load_tokenizer
from dapo_runner.policy.routing import Routing
from dapo_runner.types import Completion, RolloutRequest, SamplingParams, TruncatedSupport

# Rows that have ended are dropped from the batch when they are this share of it: dropping copies the cache.
DEAD_SHARE = 0.25
ROOM = 64  # most tokens for which the cache gets memory at once
# Tokens that are decoded beyond those a stop string may span (it has no more tokens than bytes): a decoder may treat
# what it takes for a beginning in its own way, such as dropping a space.
STOP_MARGIN = 4


class _Past(NamedTuple):
    """The key-value cache of the first N tokens of an episode, in that of the batch in which its last turn ended."""

    layers: list[tuple[Tensor, Tensor]]  # keys and values, each [rows, heads, positions, head size]
    line: int
    positions: Tensor  # int64 [N], of its tokens; the others are padding and what was computed after its end


@dataclass(slots=True, eq=False)
class _Row:
    """A response in the making: sample number ``sample`` of prompt number ``number`` of the call. ``past``: of the
    earlier turns before it is decoded, of this one too afterwards.
    """

    number: int
    sample: int
    request: RolloutRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)  # of the prompt, then of each token
    is_stopped: bool = False
    past: _Past | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.request.prompt.token_ids

    @property
    def is_running(self) -> bool:
        return not self.is_stopped and len(self.tokens) < self.request.sampling.max_tokens

    def support(self) -> TruncatedSupport | None:
        if not self.supports:
            return None
        counts = torch.tensor([len(ids) for ids in self.supports], dtype=torch.int32)
        return TruncatedSupport(torch.cat(self.supports), counts)

    def routed(self) -> Tensor | None:
        """Return the experts as in ``Completion``. The batch may have gone on after the last token."""
        n = len(self.prompt_ids) + len(self.tokens) - 1
        return torch.cat(self.experts)[:n] if self.experts else None


class HFEngine(RolloutEngine):
    """A rollout engine over any transformers causal language model, on any device."""

    @classmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> HFEngine:
        model = load_model(source, config.model, device, "sdpa")
        if config.model.float32_logits:
            head = model.get_output_embeddings()
            head.forward = partial(_float32_logits, head)
        routing = Routing(model) if config.loss.routing_replay == "engine" else None
        return cls(model, load_tokenizer(source, config.model), config.rollout.max_batch_sequences, routing)

    def __init__(self, model: Any, tokenizer: Any, max_batch_sequences: int, routing: Routing | None = None) -> None:
        """Own ``model``: ``update_weights`` writes into it. With its ``routing`` completions have their experts."""
        AttentionInterface.register("sdpa", attention)
        self.routing, self.model = routing, model
        model.config.get_text_config(decoder=True).output_router_logits = False  # their loss fails with a cache
        self.tokenizer = tokenizer
        self.max_batch_sequences = max_batch_sequences
        is_new = "cache" in signature(model.forward).parameters  # from transformers 5.24 on
        self.cache_argument = "cache" if is_new else "past_key_values"
        self.stop_ids = stop_token_ids(model, tokenizer)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(self.model, weights)

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest], priority: int | None = None) -> Groups:
        """See ``RolloutEngine.generate``. A completion depends on its batch only by the rounding of the model: its
        random numbers come from its seed, the index of its prompt and its own in the group.
        """
        counts = [one.sampling.n if one.sampling.temperature else 1 for one in requests]  # greedy responses are equal
        groups = [[_Row(i, n, one) for n in range(counts[i])] for i, one in enumerate(requests)]
        # Prompts of like length together: little is padded.
        rows = [row for group in sorted(groups, key=lambda group: len(group[0].prompt_ids)) for row in group]
        for start in range(0, len(rows), self.max_batch_sequences):
            self._decode(rows[start : start + self.max_batch_sequences])
        return [self._completions(group) * (group[0].request.sampling.n // len(group)) for group in groups]

    def open_call(self, priority: int | None, wake: Callable[[], None], n_prompts: int) -> OpenCall:
        return _HFCall(self)

    def _decode(self, rows: list[_Row], *, keep: bool = False) -> None:
        """Sample responses for all rows side by side until the last of them has ended; ``keep`` their caches."""
        device = self.model.device
        uniform = _uniform_numbers(rows).to(device)
        logits, mask, cache = self._prefill(rows)
        for step in count():
            tokens, logprobs, supports = sample_tokens(logits, uniform[:, step], rows[0].request.sampling)
            for row, token, logprob, support in zip(rows, tokens.tolist(), logprobs.tolist(), supports, strict=True):
                if row.is_running:
                    self._append(row, token, logprob, support)
            left = [line for line, row in enumerate(rows) if row.is_running]
            if keep and len(left) <= (1 - DEAD_SHARE) * len(rows):
                _keep_past(rows, mask, cache)
            if not left:
                break
            if len(left) <= (1 - DEAD_SHARE) * len(rows):
                rows, lines = [rows[line] for line in left], torch.tensor(left, device=device)
                uniform, tokens, mask = uniform[lines], tokens[lines], mask[lines]
                cache.batch_select_indices(lines)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, cache)
            if self.routing is not None:
                for row, experts in zip(rows, self.routing.chosen().split(1), strict=True):
                    row.experts.append(experts)

    def _append(self, row: _Row, token: int, logprob: float, support: Tensor | None) -> None:
        """Add the next token of a response, sampled from ``support``: see ``sample_tokens``."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if support is not None:
            row.supports.append(support)
        row.is_stopped = token in self.stop_ids or ends_with_stop(row.tokens, row.request.sampling.stop, self.tokenizer)

    def _prefill(self, rows: list[_Row]) -> tuple[Tensor, Tensor, DynamicCache]:
        """Return the logits of the first response token [R, V], the mask [R, positions] and the cache.

        A prompt is computed once, however many rows it has, left-padded to the longest.
        """
        if all(row.past is not None for row in rows):
            return self._continue(rows)
        device = self.model.device
        in_order = sorted(rows, key=lambda row: row.number)
        prompts = {ids: place for place, ids in enumerate(dict.fromkeys(row.prompt_ids for row in in_order))}
        ids, mask = _pad_left([torch.tensor(ids) for ids in prompts], device)
        cache = self._empty_cache()
        logits = self._forward(ids, mask, cache)
        spread = torch.tensor([prompts[row.prompt_ids] for row in rows], device=device)
        if self.routing is not None:
            experts = self.routing.chosen().unflatten(0, ids.shape)
            for row, place in zip(rows, spread.tolist(), strict=True):
                row.experts = [experts[place, -len(row.prompt_ids) :]]
        cache.batch_select_indices(spread)
        return logits[spread], mask[spread], cache

    def _continue(self, rows: list[_Row]) -> tuple[Tensor, Tensor, DynamicCache]:
        """Do the same for rows that each have the cache of how their prompt begins."""
        pasts = [row.past for row in rows if row.past is not None]
        positions, seen = _pad_left([past.positions for past in pasts], self.model.device)
        cache, pairs = self._empty_cache(), list(zip(pasts, positions, strict=True))
        for layer in range(len(pasts[0].layers)):
            sides = ([past.layers[layer][side][past.line][:, own] for past, own in pairs] for side in (0, 1))
            cache.update(*map(torch.stack, sides), layer)
        for row in rows:
            row.past = None  # not to hold it twice
        tails = (row.prompt_ids[len(past.positions) :] for row, past in zip(rows, pasts, strict=True))
        ids, new = _pad_left([torch.tensor(tail) for tail in tails], seen.device)
        mask = torch.cat([seen, new], dim=1)
        return self._forward(ids, mask, cache), mask, cache

    def _empty_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        return cache

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Return the logits [B, V] after the last of ``ids``; ``mask`` covers the cache and ``ids``."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"use_cache": True, "logits_to_keep": 1, self.cache_argument: cache}
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **options).logits[:, -1]

    def _completions(self, rows: list[_Row]) -> list[Completion]:
        texts = self.tokenizer.batch_decode([row.tokens for row in rows], skip_special_tokens=True)
        return [
            Completion(
                token_ids=torch.tensor(row.tokens),
                logprobs=torch.tensor(row.logprobs),
                finish_reason="stop" if row.is_stopped else "length",
                text=text,
                support=row.support(),
                experts=row.routed(),
            )
            for row, text in zip(rows, texts, strict=True)
        ]


class _HFCall(BatchCall):
    """Continues the key-value cache of an episode, which is not computed again."""

    def __init__(self, engine: HFEngine) -> None:
        super().__init__(engine.generate)
        self.engine = engine
        self._rows: dict[int, _Row] = {}  # of the last round, without episodes that had ended

    @torch.no_grad()
    def work(self) -> list[tuple[int, Completion]]:
        added, self._open = sorted(self._open.items()), {}
        rows = {key: _Row(key, 0, request, past=getattr(self._rows.get(key), "past", None)) for key, request in added}
        self._rows = rows
        ordered = sorted(rows.values(), key=lambda row: len(row.prompt_ids))
        for start in range(0, len(ordered), self.engine.max_batch_sequences):
            self.engine._decode(ordered[start : start + self.engine.max_batch_sequences], keep=True)
        return list(zip(rows, self.engine._completions(list(rows.values())), strict=True))


class _RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in tensors with room for more tokens. ``DynamicLayer`` copies all of them for each token."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        self.keys, self.values = _append_states(self.keys, keys), _append_states(self.values, values)
        return self.keys, self.values


def _append_states(held: Tensor, new: Tensor) -> Tensor:
    """Return states [B, heads, N, size] followed by new ones, written behind them if there is room."""
    (batch, heads, start, size), end = held.shape, held.shape[2] + new.shape[2]
    if start == 0 or end * size > held.stride(1):
        roomy = new.new_empty(batch, heads, end + min(ROOM, 4 + end // 4), size)
        roomy[:, :, :start] = held
        held = roomy
    states = held.as_strided((batch, heads, end, size), held.stride())
    states[:, :, start:] = new
    return states


def _keep_past(rows: list[_Row], mask: Tensor, cache: DynamicCache) -> None:
    """Give the rows that have ended their cache. ``mask``: see ``HFEngine._prefill``."""
    if not all(type(layer) is _RoomyLayer for layer in cache.layers):
        return  # a sliding window has forgotten what it has seen
    ended = [line for line, row in enumerate(rows) if not row.is_running]
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    if len(ended) < len(rows):  # the others go on
        layers = [(keys[ended], values[ended]) for keys, values in layers]
    for place, line in enumerate(ended):
        n_seen = len(rows[line].prompt_ids) + len(rows[line].tokens) - 1
        rows[line].past = _Past(layers, place, mask[line].nonzero()[:n_seen, 0])


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does: query [B, Hq, L, D], key and value [B, Hk, S, D] → [B, L, Hq, D].

    With a mask, that one copies keys and values for all query heads that share them. On a CPU torch's kernel gives the
    same bits without copies. For one token per row, query heads that share a key are folded into the query length, as
    transformers does since 5.24, because it is faster. Before 5.24 the result differs by rounding.
    ``HFEngine`` registers this function for the whole process.
    """
    is_plain = query.device.type == "cpu" and not torch.is_grad_enabled()
    if attention_mask is None or not is_plain or options.keys() & {"position_bias", "cache"}:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale, (batch, heads, length, _) = options.get("scaling"), query.shape
    if length == 1 and attention_mask.shape[1] == 1:
        query = query.view(batch, key.shape[1], -1, query.shape[-1])
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def _pad_left(tensors: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tensors of unlike lengths side by side, with zeros in front of the shorter ones, and where they are."""
    both = (tensors, list(map(torch.ones_like, tensors)))
    ids, mask = (pad_sequence(each, batch_first=True, padding_side="left").to(device) for each in both)
    return ids, mask


def _float32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    return F.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())


def ends_with_stop(tokens: Sequence[int], strings: Sequence[str], tokenizer: Any) -> bool:
    """Return whether the last of ``tokens`` completes one of ``strings``."""
    if not strings:
        return False
    window = STOP_MARGIN + max(len(string.encode()) for string in strings)
    text = tokenizer.decode(tokens[-window:], skip_special_tokens=False)
    return any(string in text for string in strings)


def sample_tokens(
    logits: Tensor, uniform: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """Draw tokens by inverting the cumulative distribution at ``uniform`` numbers [B].

    Returns tokens int64 [B], their float32 log-probs [B] and the ids they were sampled from, int32 on the CPU, none if
    that is the whole vocabulary. Log-probs are the policy's own, temperature included, top_p, top_k and min_p not;
    greedy tokens have those at temperature 1. With ``sampling_mask`` they are those of the truncated distribution;
    without, the third are Nones.
    """
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    probs = _truncate(logprobs.exp(), sampling)
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:]
    # Below the total, so that rounding cannot point past the last token that has any probability.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, total.new_zeros(())))
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)  # NaN: the last token
    if sampling.temperature == 0:
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    supports: Sequence[Tensor | None] = [None] * len(tokens)
    if sampling.sampling_mask:
        kept = probs > 0
        logprobs = logprobs - logprobs.masked_fill(~kept, -torch.inf).logsumexp(dim=-1, keepdim=True)
        kept &= ~kept.all(dim=-1, keepdim=True)
        supports = kept.nonzero()[:, 1].to(torch.int32).cpu().split(kept.sum(dim=-1).tolist())
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1), supports


def _truncate(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Keep tokens with at least `min_p` of the likeliest one's probability, of these the `top_k` likeliest, those as
    likely as the last of them included, and of these the fewest that reach `top_p`, the one that crosses it included.
    """
    n = probs.shape[-1]
    if sampling.top_k is not None or sampling.min_p > 0:
        largest = probs.topk(min(sampling.top_k or 1, n)).values
        last = largest[:, -1:] * (sampling.top_k is not None)
        probs = probs.masked_fill(probs < torch.maximum(last, sampling.min_p * largest[:, :1]), 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1:
        # All tokens below this probability have less than 1 - top_p together: they are never kept, and not sorted.
        most = (probs >= (1 - sampling.top_p) / (2 * n)).sum(dim=-1).max()
        largest = probs.topk(max(1, int(most))).values
        n_kept = (largest.cumsum(dim=-1) - largest < sampling.top_p).sum(dim=-1, keepdim=True)
        last = largest.gather(-1, (n_kept - 1).clamp(min=0))
        probs = probs.masked_fill(probs < last, 0.0)
        n_surplus = (probs > 0).sum(dim=-1, keepdim=True) - n_kept
        if n_surplus.any():  # of the tokens as likely as the last, the first in the vocabulary are kept
            is_last = probs == last
            left = is_last.sum(dim=-1, keepdim=True) - n_surplus
            probs = probs.masked_fill(is_last & (is_last.cumsum(dim=-1) > left), 0.0)
    return probs


def _uniform_numbers(rows: list[_Row]) -> Tensor:
    """Return random numbers in [0, 1), [R, longest limit]."""
    numbers = torch.zeros(len(rows), max(row.request.sampling.max_tokens for row in rows))
    generator = torch.Generator()
    for line, row in zip(numbers, rows, strict=True):
        # A hash, not a sum: prompt 1 sample 0 of one seed must not have the numbers of prompt 0 sample 1 of the next.
        sampling = row.request.sampling
        name = f"{sampling.seed}:{row.request.index}:{row.sample}".encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1)
        line[: sampling.max_tokens] = torch.rand(sampling.max_tokens, generator=generator)
    return numbers
