"""float16 with a loss scale, and a float32 head: against float64, float32 and the rule of the scale written out."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import make_config, random_sequences
from torch import Tensor

from dapo_runner.algorithms.learner import Learner, mean_of
from dapo_runner.algorithms.losses import Output
from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.algorithms.packing import pack
from dapo_runner.cli import main
from dapo_runner.config import Config, ConfigError, ModelConfig, lay_over, parse_config
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.preflight.dry_run import resolved_yaml, summarize
from dapo_runner.rollout.engine import open_engine

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SMALL = {"model": {"tiny": {}}, "data": {"format": "arithmetic"}, "reward": {"overlong": {"cache_length": 16}}}
LORA = {"rank": 4, "alpha": 8}


def learner_of(folder: Path, dtype: str, teacher: Policy | None = None, **sections: Any) -> Learner:
    model = {"tiny": None, "path": str(folder), "dtype": dtype, **sections.pop("model", {})}
    optimizer = {"token_budget": 95, "lr": 1e-3, "warmup_steps": 0, "grad_clip": None}
    config = make_config(model=model, optimizer=optimizer, **sections)
    return Learner(load_policy(folder, config.model, CPU), config, teacher)


def gradient(learner: Learner, monkeypatch: pytest.MonkeyPatch, batch_factor: int) -> Tensor:
    """Of an update whose mini-batch is ``batch_factor`` times as large as what this rank has of it."""
    found = list[Tensor]()

    def keep() -> None:
        found.extend(tensor.grad.flatten().clone() for tensor in learner.master.gradients() if tensor.grad is not None)

    (mini,) = learner.prepare(random_sequences(12))
    mini.denominator *= batch_factor
    monkeypatch.setattr(learner.optimizer, "step", keep)
    learner.update(mini, 0)
    return torch.cat(found) * batch_factor


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_scaled_loss_keeps_gradients_that_float16_cannot_hold(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None
) -> None:
    """Those of a token-mean over a million times as many tokens, which are far below float16's smallest number."""
    exact = gradient(learner_of(model_folder, "float32", model={"lora": lora}), monkeypatch, 1)
    scaled = learner_of(model_folder, "float16", model={"lora": lora})
    got = gradient(scaled, monkeypatch, 10**6)
    assert (got - exact).norm() < 0.02 * exact.norm()
    unscaled = learner_of(model_folder, "float16", model={"lora": lora})
    unscaled.trained.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert (gradient(unscaled, monkeypatch, 10**6) - exact).norm() > 0.2 * exact.norm()


def test_an_overflow_skips_the_update_and_halves_the_scale(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(model_folder, "float16")
    learner.trained.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    original = learner.compute_loss
    overflows = [False, True, True, False, False, False, True]
    updates, expected, scale, n_good = [], [], 1024.0, 0
    for step, overflow in enumerate(overflows):

        def compute_loss(*arguments: Any, factor: float = 1e30 if overflow else 1.0) -> Output:
            out = original(*arguments)
            return out._replace(loss=out.loss + (factor - 1.0) * (out.loss - out.loss.detach()))

        monkeypatch.setattr(learner, "compute_loss", compute_loss)
        before = {name: tensor.detach().clone() for name, tensor in learner.master.tensors.items()}
        (mini,) = learner.prepare(random_sequences(8, seed=step))
        updates.append(learner.update(mini, step))
        is_same = all(torch.equal(before[name], tensor) for name, tensor in learner.master.tensors.items())
        assert is_same == overflow, step
        expected.append((scale, float(overflow)))
        n_good = 0 if overflow else n_good + 1
        scale = scale / 2 if overflow else scale * 2 if n_good == 2 else scale
        n_good %= 2
    assert [(found["loss_scale"], found["skipped_updates"]) for found in updates] == expected
    together = mean_of(updates)
    assert together["skipped_updates"] == 3
    assert torch.tensor(together["grad_norm"]).isfinite()


def test_the_scale_is_doubled_after_400_updates_without_an_overflow(model_folder: Path) -> None:
    learner = learner_of(model_folder, "float16")
    learner.trained.scaler.load_state_dict({**learner.trained.scaler.state_dict(), "scale": 1024.0})
    found = []
    for n_good in (398, 399, 0):
        state = learner.trained.scaler.state_dict()
        learner.trained.scaler.load_state_dict({**state, "_growth_tracker": n_good})
        (mini,) = learner.prepare(random_sequences(4))
        found.append(learner.update(mini, 0)["loss_scale"])
    assert found == [1024.0, 1024.0, 2048.0]


def test_the_loss_that_is_reported_does_not_depend_on_the_scale(model_folder: Path) -> None:
    losses = []
    for scale in (1.0, 2.0**10):
        learner = learner_of(model_folder, "float16")
        learner.trained.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        (mini,) = learner.prepare(random_sequences(8))
        losses.append(learner.update(mini, 0)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) != 0


def test_the_gradient_of_distillation_does_not_depend_on_the_scale(model_folder: Path) -> None:
    found = []
    teacher = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU, role="reference")
    with torch.no_grad():
        for parameter in teacher.model.parameters():
            parameter.mul_(1.5)
    for scale in (1.0, 2.0**10):
        learner = learner_of(model_folder, "float16", teacher, distillation={"teacher": str(model_folder)})
        learner.trained.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        (mini,) = learner.prepare(random_sequences(8))
        figures = learner.update(mini, 0)
        found.append((figures["loss"], float(figures["grad_norm"])))
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    assert min(found[0]) > 0


def test_the_gradient_of_the_critic_does_not_depend_on_the_scale(model_folder: Path) -> None:
    found = []
    model = {"tiny": None, "path": str(model_folder), "dtype": "float16"}
    optimizer = {"token_budget": 95, "warmup_steps": 0, "grad_clip": None}
    config = make_config(model=model, optimizer=optimizer, advantage={"kind": "gae"}, critic={})
    sequences = [replace(sequence, reward=number % 3 - 0.7) for number, sequence in enumerate(random_sequences(8))]
    for scale in (1.0, 2.0**10):
        policy, critic = (load_policy(model_folder, config.model, CPU, role=role) for role in ("policy", "critic"))
        learner = Learner(policy, config, None, critic)
        assert learner.critic is not None
        assert learner.critic.trained is not None
        learner.critic.trained.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        (mini,) = learner.prepare(sequences)
        found.append(float(learner.update(mini, 0)["value_grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-2) != 0


def test_an_overflow_that_no_scale_can_help_stops_the_run(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(model_folder, "float16")
    learner.trained.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    norm = learner.trained.clip_gradients
    monkeypatch.setattr(learner.trained, "clip_gradients", lambda: norm() * float("inf"))
    (mini,) = learner.prepare(random_sequences(8))
    with pytest.raises(NonFiniteUpdateError):
        learner.update(mini, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_head_is_that_of_float64(model_folder: Path, dtype: str) -> None:
    """Of the trainer, and of the rollout engine, over the same hidden states and weights."""
    errors = {}
    for wide in (False, True):
        learner = learner_of(model_folder, dtype, model={"float32_logits": wide})
        (batch,) = pack([one for one in random_sequences(4) if one.mask.any()], 1024)
        with torch.no_grad():
            hidden, head = learner.policy.hidden_states(batch), learner.policy.head.weight
        exact = (hidden.double() @ head.double().T).log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
        errors[wide] = float((learner.logprobs(batch) - exact.detach())[batch.mask].abs().max())
        engine: Any = open_engine(learner.config, model_folder, CPU)
        logits = engine.model.get_output_embeddings()(hidden)
        assert (logits.dtype == torch.float32) == wide
        assert float((logits.double() - hidden.double() @ head.double().T).abs().max()) < (1e-5 if wide else 1.0)
    assert errors[True] < 5e-6 < 1e-4 < errors[False]


def matched(**sections: Any) -> Config:
    return parse_config({**SMALL, "numerics": "matched", **sections})


def test_matched_sets_every_part_and_a_recipe_overrides_each() -> None:
    config = matched()
    assert (config.model.dtype, config.model.float32_logits) == ("float16", True)
    correction = config.rollout.correction
    assert (correction.weights, correction.mask, correction.lower_bound, correction.bound) == ("token", "token", 0.5, 5)
    assert config.rollout.max_mismatch_kl == 0.015
    assert not config.rollout.vllm.batch_invariant
    assert matched(model={"tiny": {}, "dtype": "bfloat16"}).model == ModelConfig.model_validate(
        {"tiny": {}, "dtype": "bfloat16", "float32_logits": True}
    )
    assert not matched(loss={"old_logprobs": "rollout"}).rollout.correction.enabled
    assert matched(rollout={"correction": {"mask": "sequence", "bound": 2.0}}).rollout.correction.weights is None
    assert not matched(distillation={"teacher": "x"}).rollout.correction.enabled
    assert not matched(preference={}, optimizer={"token_budget": 50000}).rollout.correction.enabled
    assert "model.dtype=float16" in summarize(config)["numerics"]
    assert "float32_logits: true" in resolved_yaml(config)


def test_matched_asks_for_batch_invariance_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM refuses it on a CPU. What a recipe sets stays."""

    def is_set(device: str, engine: str = "vllm", **vllm: bool) -> bool:
        return matched(run={"device": device}, rollout={"engine": engine, "vllm": vllm}).rollout.vllm.batch_invariant

    assert is_set("cuda")
    assert is_set("cuda", "server")
    assert is_set("cpu", batch_invariant=True)
    assert not is_set("cuda", batch_invariant=False)
    assert not is_set("cpu")
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert is_set("auto") == has_gpu


@pytest.mark.parametrize(
    "sections", [{"distillation": None}, {"preference": None}, {"rollout": {"correction": {}}}, {"rollout": {}}]
)
def test_a_section_that_sets_nothing_leaves_the_correction_of_matched(sections: dict[str, Any]) -> None:
    assert matched(**sections).rollout.correction == matched().rollout.correction
    assert matched(**sections).rollout.correction.lower_bound == 0.5


def test_matched_with_truncated_sampling_requires_the_sampling_mask() -> None:
    """Without it the engine's log-probs may be those of another distribution than the loss has."""
    with pytest.raises(ConfigError, match=r"rollout\.sampling_mask"):
        matched(rollout={"min_p": 0.1})
    assert matched(rollout={"min_p": 0.1, "sampling_mask": True}).rollout.correction.enabled


def test_the_snippets_of_the_page_run_and_its_table_is_the_measured_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/mismatch.md").read_text(encoding="utf-8")
    kinds = dict.fromkeys(("yaml", ""), 0)
    for kind, snippet in re.findall(r"```(\w*)\n(.+?)```", page, re.DOTALL):
        kinds[kind] += 1
        if kind == "yaml":
            parse_config(lay_over(SMALL, yaml.safe_load(snippet)))
        elif snippet.startswith("dapo"):
            assert main(shlex.split(snippet)[1:]) == 0
    assert kinds == {"yaml": 8, "": 1}
    assert "model.dtype=bfloat16" in capsys.readouterr().out
    (path,) = re.findall(r"\]\(\.\./(benchmarks/results/mismatch-\S+?)\)", page)
    rows = [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows) == 7
    assert set(rows) <= set(page.splitlines())
