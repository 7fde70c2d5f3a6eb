"""Routing replay: the experts of an old log-prob, or of the engine that sampled, are those of the update."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import random_sequences, save_model
from experts import small_experts
from learners import CPU, config_of, learner_of, open_learner, update
from refusals import refused
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config
from dapo_runner.engines.hf import HFEngine
from dapo_runner.engines.vllm import engine_arguments, layers_with_experts, read_experts
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.routing import Routing
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import Group, Prompt, Sample, SamplingParams, TrainingSequence, Verdict, make_requests

IN_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "granitemoe": {},
    "glm4_moe": IN_GROUPS,
    "deepseek_v2": IN_GROUPS | LATENT | {"topk_method": "group_limited_greedy"},
}
PROMPTS = [Prompt(str(n), tuple(range(3, 5 + 3 * n)), "", "") for n in range(3)]


def blocks_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "experts")]


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


class Seen:
    """What a model's experts are called with: for each layer the indices [U, k], call by call."""

    def __init__(self, model: Any) -> None:
        self.calls: list[list[Tensor]] = []
        for block in blocks_of(model):
            calls: list[Tensor] = []
            self.calls.append(calls)
            block.experts.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[1].clone()))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_pass_follows_what_another_chose(kind: str) -> None:
    """To the same bits as long as the weights are the same, and with the routers' gradient."""
    model = small_experts(kind, **LAYOUTS[kind])
    routing, ids = Routing(model), torch.randint(3, 20, (1, 30))
    with torch.no_grad():
        routing.check(lambda: hidden_of(model, ids), 30)
        first, chosen = hidden_of(model, ids), routing.chosen()
        routing.follow(chosen)
        assert torch.equal(hidden_of(model, ids), first)
        routers = [p for name, p in model.named_parameters() if "gate.weight" in name or "router.weight" in name]
        for router in routers:
            router.copy_(torch.randn_like(router))
    assert chosen.dtype == torch.uint8
    seen = Seen(model)
    hidden_of(model, ids).square().mean().backward()
    k, width = 2, chosen.shape[1] // 2
    replayed = [layer[:, width - k :].long() for layer in chosen.split(width, dim=1)]
    assert all(torch.equal(calls.pop(), expected) for calls, expected in zip(seen.calls, replayed, strict=True))
    assert all(router.grad is not None and bool(router.grad.any()) for router in routers)
    with refused("loss.routing_replay"):  # as vLLM returns no choices of groups of experts
        routing.follow(chosen[:, 1:])
    routing.follow(None)
    hidden_of(model, ids)
    assert not any(torch.equal(calls[0], expected) for calls, expected in zip(seen.calls, replayed, strict=True))


class Choosing(nn.Module):
    """A layer with experts whose result depends on its choice, or not."""

    def __init__(self, listens: bool) -> None:
        super().__init__()
        self.experts, self.listens = nn.Linear(4, 4), listens

    def forward(self, x: Tensor) -> Tensor:
        choice, out = x.topk(2).indices, self.experts(x)
        return out + choice.sum(-1, keepdim=True) if self.listens else out


def test_a_model_whose_routing_cannot_be_replayed_is_refused() -> None:
    ids, x = torch.arange(3, 9)[None], torch.randn(6, 4)
    for name, kind in (("PhimoeSparseMoeBlock", "phimoe"), ("Qwen3ForCausalLM", "qwen3")):
        model = small_experts(kind)
        with refused("loss.routing_replay") as caught, torch.no_grad():
            Routing(model).check(lambda model=model: hidden_of(model, ids), 6)
        assert name in str(caught.value)
    listening = Choosing(listens=True)
    with torch.no_grad():
        Routing(nn.Sequential(listening)).check(lambda: listening(x), 6)
        for layers in ([Choosing(listens=False)], [listening, listening]):  # one that is run twice
            model = nn.Sequential(*layers)
            with refused("loss.routing_replay"):
                Routing(model).check(lambda model=model: model(x), 6)


def test_an_interrupted_pass_leaves_nothing_in_force() -> None:
    model, ids = small_experts(), torch.arange(3, 9)[None]
    routing = Routing(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    blocks_of(model)[-1].experts.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        routing.check(lambda: hidden_of(model, ids), 6)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(small_experts(), make_tokenizer(), tmp_path_factory.mktemp("experts"))


def sharing_sequences() -> list[TrainingSequence]:
    """Of which every other one begins as the one before it."""
    sequences = random_sequences(32)
    for one, other in zip(sequences[::2], sequences[1::2], strict=True):
        n = min(one.length, other.length) - 2
        other.token_ids[:n] = one.token_ids[:n]
    return sequences


def trainer(path: Path, replay: str | None, **model: Any) -> Learner:
    optimizer = {"mini_batch_size": 16, "token_budget": 120, "lr": 3e-3}
    sections = {"optimizer": optimizer, "sampler": {"prompts_per_step": 8}, "loss": {"routing_replay": replay}}
    return learner_of(path, model=model, **sections)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_an_update_tokens_keep_their_experts(folder: Path, checkpointing: bool) -> None:
    """In the pass and in its recomputation, over prefixes that sequences share; the routers send some elsewhere."""
    found = []
    for replay in ("trainer", None):
        learner = trainer(folder, replay, gradient_checkpointing=checkpointing)
        first, second = learner.prepare(sharing_sequences())
        learner.update(first, 0)
        assert all(batch.experts is None for batch in first.micro_batches)
        seen = Seen(learner.policy.model)
        learner.update(second, 0)
        found.append((second, seen.calls))
    (replayed, calls), (free, free_calls) = found
    assert all(batch.experts is None for batch in free.micro_batches)
    n_rows = [(len(batch.experts), batch.n_positions) for batch in replayed.micro_batches if batch.experts is not None]
    assert any(rows < positions for rows, positions in n_rows)  # those of shared prefixes once
    n_runs, elsewhere, total = 1 + checkpointing, 0, 0
    for number, batch in enumerate(replayed.micro_batches):
        assert batch.experts is not None
        for layer, expected in enumerate(batch.experts.long().split(2, dim=1)):
            runs = calls[layer][number * n_runs : (number + 1) * n_runs]
            assert [torch.equal(run, expected) for run in runs] == [True] * n_runs
            elsewhere += int((free_calls[layer][number * n_runs] != expected).any(1).sum())
            total += len(expected)
    assert 0.01 * total < elsewhere < 0.5 * total


def test_an_adapted_model_is_its_own_reference_with_its_own_routing(folder: Path) -> None:
    learner = trainer(folder, "trainer", lora={"rank": 2, "alpha": 4, "targets": ["q_proj"]})
    _, mini = learner.prepare(sharing_sequences())
    batch = mini.micro_batches[0]
    assert batch.experts is not None
    other = replace(batch, experts=(batch.experts + 1) % 8)
    assert torch.equal(learner.ref_logprobs(other), learner.ref_logprobs(replace(batch, experts=None)))
    assert not torch.equal(learner.logprobs(other), learner.logprobs(batch))


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four experts each that the router hardly tells apart, and that give unlike results."""
    model = small_experts()
    with torch.no_grad():
        for block in blocks_of(model):
            gate = block.gate.weight
            gate.copy_(gate[::4].repeat_interleave(4, 0) + 1e-3 * torch.randn_like(gate))
    model.config.output_router_logits = True  # as after training with an auxiliary loss
    return save_model(model, make_tokenizer(), tmp_path_factory.mktemp("undecided"))


def replaying(folder: Path, replay: str | None = "engine", dtype: str = "float32", **sections: Any) -> Config:
    sections["rollout"] = {"max_response_tokens": 24, **sections.get("rollout", {})}
    optimizer = {"token_budget": 130}
    return config_of(folder, dtype, loss={"routing_replay": replay}, optimizer=optimizer, **sections)


def sampled(folder: Path, dtype: str) -> list[Group]:
    """Groups whose samples share a prompt and are of unlike lengths."""
    engine = HFEngine.load(folder, replaying(folder, dtype=dtype), CPU, SINGLE_PROCESS, print)
    engine.max_batch_sequences, engine.stop_ids = 7, [5, 9, 14, 20]
    groups = engine.generate(make_requests(PROMPTS, SamplingParams(n=4, max_tokens=24, seed=3)))
    assert len({one.length for group in groups for one in group}) > 3
    return [
        Group(prompt, tuple(Sample(one, Verdict(correct=False), 0.0) for one in group))
        for prompt, group in zip(PROMPTS, groups, strict=True)
    ]


def sequences_of(groups: list[Group]) -> list[TrainingSequence]:
    return [
        make_sequence(group, sample, 1.0 - 0.7 * place, number, 0)
        for number, group in enumerate(groups)
        for place, sample in enumerate(group.samples)
    ]


def test_the_engine_returns_the_experts_of_every_token_that_it_computes(undecided: Path) -> None:
    """Those of a pass over the whole sequence, alone, but where rounding decides. A buffer that is saved keeps them."""
    buffer, again, file = GroupBuffer(replaying(undecided)), GroupBuffer(replaying(undecided)), BytesIO()
    buffer.groups = sampled(undecided, "float32")
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True), {})
    model = HFEngine.load(undecided, replaying(undecided, None), CPU, SINGLE_PROCESS, print).model
    seen, same = Seen(model), list[bool]()
    for sequence in sequences_of(again.groups):
        with torch.no_grad():
            model(input_ids=sequence.token_ids[None, :-1])
        assert sequence.experts is not None
        assert sequence.experts.dtype == torch.uint8
        chosen = torch.cat([calls.pop() for calls in seen.calls], dim=1)
        assert sequence.experts.shape == chosen.shape
        same.extend((sequence.experts == chosen).all(dim=1).tolist())
    assert sum(same) > 0.9 * len(same)


class Forced(nn.Module):
    """A router of Qwen3-MoE that takes the experts it is given, written out."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight, self.indices = gate.weight, torch.zeros(0)
        self.normalizes = gate.norm_topk_prob

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden, self.weight)
        weights = logits.softmax(-1).gather(1, self.indices)
        return logits, weights / weights.sum(-1, keepdim=True) if self.normalizes else weights, self.indices


@pytest.mark.parametrize("correction", [{}, {"mask": "token", "bound": 1e9}], ids=["on-policy", "after a pass"])
def test_the_gradient_is_that_of_routers_forced_by_hand(undecided: Path, correction: dict[str, Any]) -> None:
    """The choice of a bfloat16 engine, sequence by sequence. Replay makes the gap to that engine smaller."""
    sequences = sequences_of(sampled(undecided, "bfloat16"))
    learner = open_learner(undecided, replaying(undecided, rollout={"correction": correction}))
    (mini,) = learner.prepare(sequences)
    for batch in mini.micro_batches:
        assert batch.experts is not None
        assert (len(batch.experts) < batch.n_positions) == bool(correction)  # that pass has shared prompts once
    gradients, figures = update(learner, mini)
    model = HFEngine.load(undecided, replaying(undecided, None), CPU, SINGLE_PROCESS, print).model
    blocks = blocks_of(model)
    for block in blocks:
        block.gate = Forced(block.gate)
    n_tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
    for sequence in sequences:
        assert sequence.experts is not None
        for block, indices in zip(blocks, sequence.experts.long().split(2, dim=1), strict=True):
            block.gate.indices = indices
        logits = model(input_ids=sequence.token_ids[None, :-1], use_cache=False).logits[0]
        logprobs = log_softmax(logits, -1).gather(1, sequence.token_ids[1:, None])[:, 0]
        (-(logprobs * sequence.advantages[1:])[sequence.mask[1:]].sum() / n_tokens).backward()
    for name, parameter in model.named_parameters():
        assert float(gradients[name].abs().max()) > 1e-5, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    free = open_learner(undecided, replaying(undecided, None))
    minis = free.prepare([replace(sequence, experts=None) for sequence in sequences])
    gap, free_gap = (
        learner.step_metrics(*x)["rollout_gap"] for x in (([mini], [figures]), (minis, [free.update(minis[0], 0)]))
    )
    assert 0 < gap < 0.2 * free_gap


def test_experts_as_vllm_returns_them(undecided: Path) -> None:
    """It has rows for all layers, zeros for those without experts, and uint16 for more than 256 experts."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module() for _ in range(3)])
    for layer in (1, 2):
        model.layers[layer].mlp = nn.Module()
        model.layers[layer].mlp.experts = nn.Linear(1, 1)
    assert layers_with_experts(model) == [1, 2]
    for dtype, expected in ((np.uint8, torch.uint8), (np.uint16, torch.int16)):
        rows = np.arange(5 * 3 * 2, dtype=dtype).reshape(5, 3, 2)
        found = read_experts(rows, [1, 2])
        assert found.dtype == expected
        assert found.tolist() == rows[:, 1:].reshape(5, 4).tolist()
    on_vllm = replaying(undecided, rollout={"engine": "vllm"})
    assert engine_arguments(undecided, on_vllm, CPU)["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in engine_arguments(undecided, replaying(undecided, None), CPU)
