"""Advantages per token and what belongs to them: refused where it would have no effect, told where it has one."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_config

from dapo_runner.algorithms.objective import resolve_objective, uses_reference
from dapo_runner.config import ConfigError
from dapo_runner.preflight.memory import memory_estimate, model_shape

GAE: dict[str, Any] = {"advantage": {"kind": "gae"}, "critic": {}}
KL: dict[str, Any] = {"reward": {"kl": {"coef": 0.1}}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"advantage": {"kind": "gae"}}, "critic: .*null"),
        ({"critic": {}}, "critic: .*advantage.kind=gae"),
        ({"advantage": {"kind": "returns"}, "critic": {}}, "critic: .*advantage.kind=gae"),
        (KL, "reward.kl: .*advantage.kind"),
        ({**GAE, **KL, "loss": {"old_logprobs": "rollout"}}, "reward.kl: .*loss.old_logprobs"),
        ({"advantage": {"gamma": 0.9}}, "advantage.gamma: .*advantage.kind"),
        ({"advantage": {"kind": "returns", "lam": 0.9}}, "advantage.lam: .*advantage.kind=gae"),
        ({**GAE, "critic": {"coef": 0.5}}, "critic.coef: .*critic.share_trunk"),
        ({**GAE, "critic": {"share_trunk": True, "lr": 1e-3}}, "critic.lr: .*critic.share_trunk"),
        (
            {**GAE, "critic": {"share_trunk": True}, "parallel": {"gpus": 2, "sequence": 2}},
            "critic.share_trunk: .*parallel.sequence",
        ),
        ({**GAE, "critic": {"warmup_steps": 3}, "run": {"steps": 3}}, "critic.warmup_steps: .* 3 "),
        ({"rollout": {"group_size": 1}}, "rollout.group_size: .*1"),
        ({**GAE, "rollout": {"group_size": 1}}, "rollout.group_size: .*sampler.filter_groups"),
        (
            {"loss": {"overrides": {"kl_coef": 0.1}, "reference_ema": 0.9}, "model": {"lora": {}}},
            "loss.reference_ema: .*model.lora",
        ),
    ],
)
def test_what_does_not_go_together(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**sections)


def test_one_response_for_each_prompt() -> None:
    config = make_config(**GAE, rollout={"group_size": 1}, sampler={"filter_groups": False})
    assert config.responses_per_step == 4


def test_a_reference_has_a_use() -> None:
    for loss in ({"reference": "some/model"}, {"reference_ema": 0.9}):
        with pytest.raises(ConfigError, match=f"loss.{next(iter(loss))}: "):
            resolve_objective(make_config(loss=loss))
        assert uses_reference(make_config(**GAE, **KL, loss=loss))


@pytest.mark.parametrize("advantage", [{"kind": "returns"}, {"segments": {"kind": "chain"}}])
def test_advantages_that_differ_within_a_response_want_an_objective_of_tokens(advantage: dict[str, Any]) -> None:
    for name in ("ppo", "gspo_token"):
        assert resolve_objective(make_config(advantage=advantage, loss={"objective": name}))
    key = "advantage.kind=returns" if "kind" in advantage else "advantage.segments"
    for name in ("gspo", "gmpo", "vespo"):
        with pytest.raises(ConfigError, match=f"loss.objective: .*{key}.*'{name}'"):
            resolve_objective(make_config(advantage=advantage, loss={"objective": name}))


def test_memory_counts_it() -> None:
    plain, ppo = make_config(), make_config(**GAE, **KL, loss={"reference_ema": 0.9})
    shape = model_shape(plain.model)
    assert shape is not None
    before, after = memory_estimate(plain, shape), memory_estimate(ppo, shape)
    more = {what: size // shape.parameters for what, size in after.items() if what not in before}
    # bfloat16: weights, float32 masters and two moments; the rounded reference and its average.
    assert more == {"reference weights": 2, "reference's float32 average": 4, "critic's weights and AdamW moments": 14}
