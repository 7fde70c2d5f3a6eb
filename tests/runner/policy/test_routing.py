"""Routing replay: the experts of the old log-probs are those of the update, whatever routers would choose by then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config, random_sequences, save_model
from experts import small_experts
from refusals import refused
from torch import Tensor

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, ConfigError
from dapo_runner.policy.model import load_policy
from dapo_runner.policy.routing import Routing
from dapo_runner.preflight.needs import check_needs
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import Sequence

CPU = torch.device("cpu")
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(small_experts(), make_tokenizer(), tmp_path_factory.mktemp("experts"))


class Seen:
    """What a model's experts are called with: for each layer the indices [U, k], call by call."""

    def __init__(self, model: Any) -> None:
        blocks = [module for module in model.modules() if hasattr(module, "experts")]
        self.calls: list[list[Tensor]] = [[] for _ in blocks]
        for block, calls in zip(blocks, self.calls, strict=True):
            block.experts.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[1].clone()))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_pass_follows_what_another_chose(kind: str) -> None:
    """To the same bits as long as the weights are the same, and with the routers' gradient."""
    model = small_experts(kind, **LAYOUTS[kind])
    routing, ids = Routing(model), torch.randint(3, 20, (1, 30))

    def run() -> Tensor:
        hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    with torch.no_grad():
        routing.check(run, 30)
        first, chosen = run(), routing.chosen()
        routing.follow(chosen)
        assert torch.equal(run(), first)
        routers = [p for name, p in model.named_parameters() if "gate.weight" in name or "router.weight" in name]
        for router in routers:
            router.copy_(torch.randn_like(router))
    assert chosen.dtype == torch.uint8
    seen = Seen(model)
    run().square().mean().backward()
    k, width = 2, chosen.shape[1] // 2
    told = [layer[:, width - k :] for layer in chosen.split(width, dim=1)]
    for calls, expected in zip(seen.calls, told, strict=True):
        assert torch.equal(calls.pop(), expected.long())
    assert all(router.grad is not None and bool(router.grad.any()) for router in routers)
    routing.follow(None)
    run()
    assert all(not torch.equal(calls[0], expected.long()) for calls, expected in zip(seen.calls, told, strict=True))


@pytest.mark.parametrize(("kind", "name"), [("phimoe", "PhimoeSparseMoeBlock"), ("qwen3", "Qwen3ForCausalLM")])
def test_an_unknown_layout_is_refused_by_name(kind: str, name: str) -> None:
    model = small_experts(kind)
    with pytest.raises(ConfigError, match=rf"loss\.routing_replay.*{name}"), torch.no_grad():
        Routing(model).check(lambda: hidden_of(model, torch.arange(3, 9)[None]), 6)


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


class Deaf(torch.nn.Module):
    """A layer whose experts do not look at the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.topk(2)
        out: Tensor = self.experts(x)
        return out


def test_experts_that_ignore_the_choice_are_refused() -> None:
    model, x = torch.nn.Sequential(Deaf()), torch.randn(6, 4)
    with refused("loss.routing_replay"), torch.no_grad():
        Routing(model).check(lambda: model(x), 6)


def test_an_interrupted_pass_leaves_nothing_in_force() -> None:
    model, ids = small_experts(), torch.arange(3, 9)[None]
    routing = Routing(model)
    experts = [module.experts for module in model.modules() if hasattr(module, "experts")]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    experts[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        routing.check(lambda: hidden_of(model, ids), 6)
    assert not torch.overrides._get_current_function_mode_stack()


def sharing_sequences() -> list[Sequence]:
    """Of which every other one begins as the one before it."""
    sequences = random_sequences(32)
    for one, other in zip(sequences[::2], sequences[1::2], strict=True):
        n = min(one.length, other.length) - 2
        other.token_ids[:n] = one.token_ids[:n]
    return sequences


def config_of(folder: Path, replay: bool = True, **model: Any) -> Config:
    return make_config(
        model={"path": str(folder), "tiny": None, "dtype": "float32", **model},
        optimizer={"mini_batch_size": 16, "token_budget": 120, "lr": 3e-3, "warmup_steps": 0},
        sampler={"prompts_per_step": 8},
        loss={"routing_replay": replay},
    )


def learner_of(folder: Path, replay: bool, **model: Any) -> Learner:
    config = config_of(folder, replay, **model)
    policy = load_policy(folder, config.model, CPU, routing_replay=replay)
    return Learner(policy, config)


@pytest.mark.parametrize("replay", [True, False])
def test_before_an_update_every_ratio_is_one(tmp_path: Path, replay: bool) -> None:
    """With one expert a token, whose weight is 1 then, routers matter by their choice alone: here they choose otherwise
    than when the old log-probs were taken, as rounding does where two experts are as good as each other.
    """
    path = save_model(small_experts(num_experts_per_tok=1, norm_topk_prob=True), make_tokenizer(), tmp_path)
    learner = learner_of(path, replay)
    _, mini = learner.prepare(sharing_sequences())
    with torch.no_grad():
        for name, parameter in learner.policy.model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.neg_()
    batch = mini.micro_batches[0]
    drift = (learner.loss(learner.policy, mini, batch, None).logprobs - batch.old_logprobs)[batch.mask].abs()
    assert (float(drift.max()) == 0) == replay


@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_an_update_tokens_keep_their_experts(folder: Path, checkpointing: bool) -> None:
    """In the pass and in its recomputation, over prefixes that sequences share; the routers send some elsewhere."""
    learner = learner_of(folder, replay=True, gradient_checkpointing=checkpointing)
    first, second = learner.prepare(sharing_sequences())
    free = learner_of(folder, replay=False, gradient_checkpointing=checkpointing)
    minis = free.prepare(sharing_sequences())
    learner.update(first, 0)
    free.update(minis[0], 0)
    assert all(batch.experts is None for batch in (*first.micro_batches, *minis[1].micro_batches))
    seen, seen_free = Seen(learner.policy.model), Seen(free.policy.model)
    learner.update(second, 0)
    free.update(minis[1], 0)
    assert any(batch.experts is not None and len(batch.experts) < batch.n_positions for batch in second.micro_batches)
    n_runs, elsewhere, total = 1 + checkpointing, 0, 0
    for number, batch in enumerate(second.micro_batches):
        assert batch.experts is not None
        for layer, expected in enumerate(batch.experts.long().split(2, dim=1)):
            runs = slice(number * n_runs, (number + 1) * n_runs)
            assert len(seen.calls[layer][runs]) == n_runs
            assert all(torch.equal(found, expected) for found in seen.calls[layer][runs])
            elsewhere += int((seen_free.calls[layer][runs][0] != expected).any(1).sum())
            total += len(expected)
    assert 0.01 * total < elsewhere < total


def test_an_adapted_model_is_its_own_reference_with_its_own_routing(folder: Path) -> None:
    learner = learner_of(folder, replay=True, lora={"rank": 2, "alpha": 4, "targets": ["q_proj"]})
    _, mini = learner.prepare(sharing_sequences())
    batch = mini.micro_batches[0]
    assert batch.experts is not None
    other = replace(batch, experts=(batch.experts + 1) % 8)
    assert torch.equal(learner.ref_logprobs(other), learner.ref_logprobs(batch.without_experts()))
    assert not torch.equal(learner.logprobs(other), learner.logprobs(batch))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"loss": {"old_logprobs": "rollout"}}, "loss.routing_replay: .*loss.old_logprobs"),
        ({"optimizer": {"mini_batch_size": None}}, "loss.routing_replay: .*mini_batch_size"),
        ({"model": {"compile": True}}, "loss.routing_replay: .*model.compile"),
        ({"model": {"path": None, "tiny": {}}}, "loss.routing_replay: .*model.tiny"),
        ({"preference": {}}, "preference: .*loss.routing_replay"),
    ],
)
def test_what_it_does_not_go_with_is_refused(folder: Path, sections: dict[str, Any], said: str) -> None:
    changed = {name: dict(values) for name, values in sections.items()}
    changed["loss"] = {"routing_replay": True} | changed.get("loss", {})
    changed["model"] = {"path": str(folder), "tiny": None} | changed.get("model", {})
    changed["optimizer"] = {"mini_batch_size": 8} | changed.get("optimizer", {})
    with pytest.raises(ConfigError, match=said):
        make_config(**changed)


def test_a_folder_without_experts_is_refused_before_it_is_loaded(folder: Path, model_folder: Path) -> None:
    check_needs(config_of(folder))
    with pytest.raises(ConfigError, match=f"loss.routing_replay: .*{model_folder}"):
        check_needs(config_of(model_folder))
