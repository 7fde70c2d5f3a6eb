"""DAPO in a loop of your own: torch, transformers, dapo_kernels. `python examples/plain_loop.py`, a minute on a CPU.

A Llama of 0.1M parameters with random weights learns to write three digits backwards, by reward alone: each response
earns the share of its digits that are right. Groups whose responses all earn the same are dropped (dynamic sampling).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_kernels import linear_dapo_loss, summarize

DIGITS, PROMPTS, GROUP, UPDATES = 3, 64, 16, 2  # UPDATES: mini-batches made of one round of sampling
EQUALS = 10  # the token after the prompt's digits


def tiny_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, max_position_embeddings=16, **sizes))


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Responses [N, DIGITS] to prompts [N, P], and their log-probs under the policy that sampled them."""
    ids, logprobs = prompts, []
    for _ in range(DIGITS):
        distribution = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1].log_softmax(-1)
        token = distribution.exp().multinomial(1)
        ids, logprobs = torch.cat([ids, token], dim=1), [*logprobs, distribution.gather(1, token)]
    return ids[:, prompts.shape[1] :], torch.cat(logprobs, dim=1)


def train(steps: int = 150, seed: int = 0) -> list[float]:
    """Mean reward of every step; stops early when no group is left to learn from."""
    torch.manual_seed(seed)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    rewards_seen = []
    for step in range(steps):
        digits = torch.randint(0, 10, (PROMPTS, DIGITS)).repeat_interleave(GROUP, dim=0)
        prompts = torch.cat([digits, torch.full((len(digits), 1), EQUALS)], dim=1)
        responses, old_logprobs = sample(model, prompts)
        rewards = (responses == digits.flip(1)).float().mean(1)
        groups = rewards.view(PROMPTS, GROUP)
        spread = groups.std(1, keepdim=True)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (spread + 1e-6)).view(-1)
        kept = (spread > 0).expand_as(groups).reshape(-1).nonzero().squeeze(1)
        rewards_seen.append(rewards.mean().item())
        if len(kept) == 0:
            break
        kept = kept[torch.randperm(len(kept))]
        for rows in kept.tensor_split(UPDATES):
            ids = torch.cat([prompts[rows], responses[rows]], dim=1)
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, DIGITS:-1]  # predict responses
            out = linear_dapo_loss(
                hidden, model.lm_head.weight, responses[rows], old_logprobs[rows], advantages[rows], objective="dapo"
            )
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            means = summarize(out.metrics)
            print(f"step {step:3d}  reward {rewards_seen[-1]:.3f}  kept {len(kept)}  clipped {means['clip_high']:.3f}")
    print(f"step {step:3d}  reward {rewards_seen[-1]:.3f}")
    return rewards_seen


if __name__ == "__main__":
    train()
