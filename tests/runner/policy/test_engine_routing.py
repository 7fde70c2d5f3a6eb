"""`loss.routing_replay: engine`: the experts that sampled a token are those of its old log-prob and of its update."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_config, save_model
from experts import small_experts
from refusals import refused
from small import small_recipe
from test_train import Notes
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.algorithms.learner import Learner, step_metrics
from dapo_runner.algorithms.packing import pack
from dapo_runner.config import Config, parse_config
from dapo_runner.logging.metrics import read_log
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout.engine import open_engine
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.vllm import VLLMEngine, engine_arguments, layers_with_experts, read_experts
from dapo_runner.run.steps import Run
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.train import train
from dapo_runner.types import Group, Prompt, Sample, SamplingParams, Sequence, Verdict

CPU = torch.device("cpu")
PROMPTS = [Prompt(str(n), tuple(range(3, 5 + 3 * n)), "", "") for n in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four experts each that the router hardly tells apart, and that give unlike results."""
    model = small_experts()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "experts"):
                gate = module.gate.weight
                gate.copy_(gate[::4].repeat_interleave(4, 0) + 1e-3 * torch.randn_like(gate))
    return save_model(model, make_tokenizer(), tmp_path_factory.mktemp("experts"))


def config_of(folder: Path, replay: str | bool = "engine", dtype: str = "float32", **sections: Any) -> Config:
    return make_config(
        model={"path": str(folder), "tiny": None, "dtype": dtype},
        optimizer={"mini_batch_size": None, "token_budget": 130, "warmup_steps": 0, "grad_clip": None},
        loss={"routing_replay": replay},
        **sections,
    )


def sampled(folder: Path, dtype: str, replay: str | bool = "engine") -> list[Group]:
    """Groups whose samples share a prompt and are of unlike lengths."""
    engine = open_engine(config_of(folder, replay, dtype), folder, CPU)
    assert isinstance(engine, HFEngine)
    engine.max_batch_sequences, engine.stop_ids = 7, [5, 9, 14, 20]
    groups = engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=24, seed=3))
    assert len({one.length for group in groups for one in group}) > 3
    return [
        Group(prompt, tuple(Sample(one, Verdict(correct=False), 0.0) for one in group))
        for prompt, group in zip(PROMPTS, groups, strict=True)
    ]


def sequences_of(groups: list[Group]) -> list[Sequence]:
    return [
        make_sequence(group, sample, 1.0 - 0.7 * place, number, 0)
        for number, group in enumerate(groups)
        for place, sample in enumerate(group.samples)
    ]


def learner_of(folder: Path, replay: str | bool = "engine", **sections: Any) -> Learner:
    config = config_of(folder, replay, **sections)
    return Learner(load_policy(folder, config.model, CPU, routing_replay=bool(replay)), config)


def test_the_engine_returns_the_experts_of_every_token_that_it_computes(folder: Path) -> None:
    """Those of a pass over the whole sequence, alone, in the engine's dtype."""
    model = open_engine(config_of(folder, False), folder, CPU).model  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "experts"):
            module.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    for sequence in sequences_of(sampled(folder, "float32")):
        seen.clear()
        with torch.no_grad():
            model(input_ids=sequence.token_ids[None, :-1])
        assert sequence.experts is not None
        assert sequence.experts.dtype == torch.uint8
        assert torch.equal(sequence.experts.long(), torch.cat(seen, dim=1))


def gap(folder: Path, groups: list[Group], replay: str | bool) -> float:
    learner = learner_of(folder, replay)
    minis = learner.prepare(sequences_of(groups))
    return step_metrics(minis, [learner.update(mini, 0) for mini in minis])["rollout_gap"]


def test_it_makes_the_gap_to_an_engine_of_another_dtype_smaller(folder: Path) -> None:
    groups = sampled(folder, "bfloat16")
    without = [
        replace(group, samples=tuple(replace(x, completion=replace(x.completion, experts=None)) for x in group.samples))
        for group in groups
    ]
    with_replay, free = gap(folder, groups, "engine"), gap(folder, without, False)
    assert 0 < with_replay < 0.2 * free


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


@pytest.mark.parametrize("correction", [None, "token"])
def test_the_gradient_is_that_of_routers_forced_by_hand(folder: Path, correction: str | None) -> None:
    """The choice of a bfloat16 engine, sequence by sequence without packing; with a correction, the old log-probs come
    from a pass of their own.
    """
    sequences = sequences_of(sampled(folder, "bfloat16"))
    learner = learner_of(folder, rollout={"correction": {"mask": correction, "bound": 1e9} if correction else {}})
    (mini,) = learner.prepare(sequences)
    rows = [len(batch.experts) - batch.n_positions for batch in mini.micro_batches if batch.experts is not None]
    assert len(rows) == len(mini.micro_batches)
    assert (max(rows) < 0) == (correction is not None)  # the pass before has those of shared prompts once
    for index in range(len(mini.micro_batches)):
        learner.compute_loss(mini, mini.micro_batches[index]).loss.backward()
    model: Any = open_engine(config_of(folder, False), folder, CPU).model  # type: ignore[attr-defined]
    blocks = [module for module in model.modules() if hasattr(module, "experts")]
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
    expected = dict(model.named_parameters())
    for name, parameter in learner.policy.model.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 1e-5, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-6, msg=name)


def test_padding_and_a_buffer_that_is_saved_keep_the_experts(folder: Path) -> None:
    groups = sampled(folder, "float32")
    buffer = GroupBuffer(config_of(folder))
    buffer.groups = groups
    file = BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    again = GroupBuffer(config_of(folder))
    again.load_state_dict(torch.load(file, weights_only=True), {})
    for found, sequence in zip(sequences_of(again.groups), sequences_of(groups), strict=True):
        assert found.experts is not None
        assert sequence.experts is not None
        assert torch.equal(found.experts, sequence.experts)
    for batch in pack(sequences_of(again.groups), 200, multiple=16):
        assert batch.experts is not None
        assert len(batch.experts) == batch.n_positions


def test_a_run_that_stopped_on_the_way_is_the_same_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_in(output: Path) -> Config:
        recipe = small_recipe(output_dir=str(output), steps=2, eval_every=0)
        recipe["sampler"] |= {"filter_groups": False}
        replay = {"model": {"path": str(folder), "dtype": "float32"}, "loss": {"routing_replay": "engine"}}
        return parse_config(recipe | replay)

    def lost(self: Run, step: int) -> None:
        end_step(self, step)
        raise KeyboardInterrupt

    whole, end_step = train(run_in(tmp_path / "whole"), Notes()), Run.end_step
    steps = [event for event in read_log(whole / "metrics.jsonl") if event["kind"] == "step"]
    assert len(steps) == 2
    assert all(event["sync/gap"] < 1e-4 for event in steps)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "end_step", lost)
        with pytest.raises(KeyboardInterrupt):
            train(run_in(tmp_path / "lost"), Notes())
    again = train(run_in(tmp_path / "lost"), Notes())
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_vllms_words_for_it() -> None:
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


def test_another_number_of_choices_is_refused(folder: Path) -> None:
    """As vLLM returns none of groups of experts."""
    learner = learner_of(folder)
    short = [
        replace(one, experts=one.experts[:, 1:])
        for one in sequences_of(sampled(folder, "float32"))
        if one.experts is not None
    ]
    (mini,) = learner.prepare(short)
    with refused("loss.routing_replay"):
        learner.update(mini, 0)


def test_what_cannot_return_them_is_refused(folder: Path) -> None:
    for sections in (
        {"rollout": {"engine": "server"}},
        {"advantage": {"segments": {"kind": "chain"}}},
        {"env": {"tools": ["trl_counter:increment"]}},
    ):
        config_of(folder, False, **sections)
        with refused("loss.routing_replay"):
            config_of(folder, **sections)
    on_vllm = config_of(folder, rollout={"engine": "vllm"})
    assert engine_arguments(folder, on_vllm, CPU)["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in engine_arguments(folder, config_of(folder, False), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda *_: True)
        with refused("loss.routing_replay"):
            VLLMEngine.check(on_vllm.model_copy(update={"run": on_vllm.run.model_copy(update={"device": "cpu"})}))
