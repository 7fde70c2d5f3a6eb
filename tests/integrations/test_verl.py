"""verl's registered losses and fused linear layer against the ones this package registers beside them.

Needs verl's core_algos, which imports on a CPU with the packages of ``requirements-verl.txt`` beside this file.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

_NEEDED = "verl's import chain: pip install --no-deps -r tests/integrations/requirements-verl.txt"
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=_NEEDED, exc_type=ImportError)

import dapo_kernels.integrations.verl as ours  # noqa: E402
from dapo_kernels import OBJECTIVES  # noqa: E402

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
GLOBAL = {"dp_size": 4, "batch_num_tokens": 977, "global_batch_size": 31, "loss_scale_factor": 64}
COUNTERPARTS = [
    *(("vanilla", name) for name in ("ppo", "dapo", "grpo", "dr_grpo", "lite_ppo")),
    ("gspo", "gspo"),
    ("gspo", "gspo_token"),
    ("sapo", "sapo"),
    ("gpg", "reinforce"),
    ("cispo", "cispo"),
    ("clip_cov", "clip_cov"),
    ("kl_cov", "kl_cov"),
    ("dppo_tv", "dppo_tv"),
    ("dppo_kl", "dppo_kl"),
    ("dro", "dro"),
]
UNWEIGHTED = ("dro",)  # there the weights are the policy term's alone


NO_CLIP_WITHOUT_ADVANTAGE = ("cispo", "dppo_tv", "dppo_kl")


class Batch(NamedTuple):
    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]


def random_batch(seed: int, rows: int = 6, width: int = 23, per_token: bool = False) -> Batch:
    """Ragged rows, one of them without a live token; ratios far enough from 1 to reach every clip."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    old = -normal(rows, width).abs()
    log_prob = -(old + normal(rows, width)).abs().clamp(min=0.01)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    lengths[rows // 2] = 0
    mask = torch.arange(width).expand(rows, width) < lengths
    advantages = normal(rows, width) if per_token else normal(rows, 1).expand(rows, width).clone()
    return Batch(old, log_prob, advantages, mask)


def actor_config(
    batch_info: dict[str, Any] | None = None, covariance: dict[str, Any] | None = None, **fields: Any
) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**{"dro_beta": 0.1, **(covariance or {})}),
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **fields},
    )
    config.global_batch_info.update(batch_info or {})
    return config


def run(name: str, batch: Batch, mode: str, config: Any, weights: Tensor | None = None) -> Result:
    """A registered loss; verl's own in float64, since its SAPO loses digits of the gradient in float32 (σ(1 − σ))."""
    if not name.startswith(ours.PREFIX):
        batch = batch._replace(**{key: x.double() for key, x in batch._asdict().items() if x.is_floating_point()})
        weights = None if weights is None else weights.double()
    log_prob = batch.log_prob.clone().requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.old_log_prob,
        log_prob=log_prob,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    value = loss.detach().clone()
    loss *= 2.0  # verl adds its entropy and KL terms in place
    loss.backward()
    assert log_prob.grad is not None
    return Result(value.float(), log_prob.grad.float() / 2.0, metrics)


def assert_same(got: Result, expected: Result) -> None:
    terms = expected.gradient.abs().sum().item()  # about Σ|L|, the scale of rounding where terms cancel
    torch.testing.assert_close(got.loss, expected.loss, rtol=2e-6, atol=2e-7 * max(terms, 1.0))
    torch.testing.assert_close(got.gradient, expected.gradient, rtol=2e-6, atol=1e-8)
    for key, value in expected.metrics.items():
        assert got.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(("theirs", "name"), COUNTERPARTS)
def test_same_as_verls_own(theirs: str, name: str, mode: str) -> None:
    for seed, batch_info, weighted in [(0, {}, False), (1, {}, True), (2, GLOBAL, False), (3, GLOBAL, True)]:
        batch = random_batch(seed, per_token=name not in ("gspo", "kl_cov"))
        # A share of 1 takes every candidate, so that the random choice is none.
        covariance = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.1}
        config = actor_config(batch_info, covariance, loss_scale_factor=batch_info.get("loss_scale_factor"))
        weights = torch.rand(batch.log_prob.shape) * 2 if weighted and name not in UNWEIGHTED else None
        if weighted and name == "gspo":
            assert weights is not None
            weights = weights[:, :1].expand_as(weights)
        expected = run(theirs, batch, mode, config, weights)
        got = run(ours.PREFIX + name, batch, mode, config, weights)
        assert_same(got, expected)
        assert expected.gradient.abs().sum() > 0
        assert set(got.metrics) == set(expected.metrics) | ({"actor/ppo_kl"} if name == "reinforce" else set())


@pytest.mark.parametrize(("theirs", "name"), COUNTERPARTS)
def test_same_at_the_edges(theirs: str, name: str) -> None:
    base = random_batch(7)
    one = Batch(*(x[:1, :1] for x in base))
    edges = {
        "on-policy": base._replace(log_prob=base.old_log_prob.clone()),
        "no advantage": base._replace(advantages=torch.zeros_like(base.advantages)),
        "large advantages": base._replace(advantages=base.advantages * 1e4),
        "one token": one,
        "integer mask": base._replace(response_mask=base.response_mask.long()),
        "certain tokens": base._replace(log_prob=torch.zeros_like(base.log_prob)),
    }
    for what, batch in edges.items():
        # kl_cov: equal covariances leave the choice open, so take all tokens or the penalty of none.
        covariance = {"clip_cov_ratio": 1.0, "kl_cov_ratio": 1.0, "ppo_kl_coef": 0.3}
        config = actor_config(covariance=covariance, clip_ratio_c=1.5)
        expected = run(theirs, batch, "token-mean", config)
        got = run(ours.PREFIX + name, batch, "token-mean", config)
        if what == "no advantage" and name in NO_CLIP_WITHOUT_ADVANTAGE:
            expected.metrics.pop("actor/pg_clipfrac")
            expected.metrics.pop("actor/pg_clipfrac_lower")
        assert_same(got, expected)


def test_dual_clip_follows_clip_ratio_c() -> None:
    batch = random_batch(3)
    for c in (1.2, 3.0, 10.0):
        config = actor_config(clip_ratio_c=c)
        expected, got = (run(name, batch, "token-mean", config) for name in ("vanilla", "dapo_kernels/dapo"))
        assert_same(got, expected)
    assert (
        run("dapo_kernels/dapo", batch, "token-mean", actor_config(clip_ratio_c=1.2)).metrics["actor/pg_clipfrac_lower"]
        > 0
    )


def test_clip_ratio_stands_in_for_low_and_high() -> None:
    batch = random_batch(4)
    config = actor_config(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None)
    for theirs, name in COUNTERPARTS:
        assert_same(run(ours.PREFIX + name, batch, "token-mean", config), run(theirs, batch, "token-mean", config))


def test_a_lower_clip_beyond_1_clips_nothing() -> None:
    """verl's CISPO recipe writes clip_ratio_low=10."""
    batch, config = random_batch(5), actor_config(clip_ratio_low=10.0)
    assert_same(run("dapo_kernels/cispo", batch, "token-mean", config), run("cispo", batch, "token-mean", config))


def test_global_counts_may_be_tensors() -> None:
    batch = random_batch(6)
    info = GLOBAL | {"batch_num_tokens": torch.tensor(977), "global_batch_size": torch.tensor(31)}
    for mode in AGGREGATIONS:
        expected = run("vanilla", batch, mode, actor_config(info))
        assert_same(run("dapo_kernels/ppo", batch, mode, actor_config(info)), expected)


def test_clip_cov_drops_as_many_tokens_as_verl() -> None:
    """The draw itself differs: verl's comes from torch.randperm over the candidates."""
    batch = random_batch(8, rows=20, width=50)
    config = actor_config(covariance={"clip_cov_ratio": 0.05, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0})
    expected, got = (run(name, batch, "token-mean", config) for name in ("clip_cov", "dapo_kernels/clip_cov"))
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert 0.04 < got.metrics["actor/pg_clipfrac"] <= 0.05
    assert (got.gradient != 0).sum() == (expected.gradient != 0).sum()


def test_spo_leaves_out_what_the_old_policy_was_sure_of() -> None:
    batch, config = random_batch(9), actor_config()
    sure = batch.old_log_prob > torch.tensor(0.9).log()
    expected = run("vanilla", batch, "token-mean", config)
    got = run("dapo_kernels/spo", batch, "token-mean", config)
    assert (sure & batch.response_mask).any()
    torch.testing.assert_close(got.gradient, torch.where(sure, 0.0, expected.gradient))


# ---- what differs on purpose ----


def test_masked_tokens_may_hold_anything() -> None:
    """verl multiplies by the mask, so that a masked NaN reaches the loss or the gradient."""
    clean, config = random_batch(10), actor_config()
    dirty = clean._replace(log_prob=torch.where(clean.response_mask, clean.log_prob, float("nan")))
    assert run("vanilla", dirty, "seq-mean-token-mean", config).loss.isnan()
    expected = run("vanilla", clean, "seq-mean-token-mean", config)
    assert_same(run("dapo_kernels/dapo", dirty, "seq-mean-token-mean", config), expected)


def test_no_live_token_gives_zero() -> None:
    """verl divides by the local count, 0."""
    batch = random_batch(11)
    batch = batch._replace(response_mask=torch.zeros_like(batch.response_mask))
    assert run("vanilla", batch, "token-mean", actor_config()).loss.isnan()
    for name in OBJECTIVES.keys() - {"top_entropy"}:
        got = run(ours.PREFIX + name, batch, "token-mean", actor_config())
        assert got.loss == 0
        assert not got.gradient.any()
        assert not any(got.metrics.values())


def test_the_log_ratio_is_not_clamped() -> None:
    """verl's stops at ±20 (gspo: 10), and the gradient with it."""
    old, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    far = Batch(old, torch.full((1, 1), -25.0), torch.ones(1, 1), mask)
    expected, got = (run(name, far, "token-mean", actor_config()) for name in ("vanilla", "dapo_kernels/dapo"))
    assert expected.gradient.item() == 0
    assert got.gradient.item() == pytest.approx(-torch.tensor(-25.0).exp().item())
    assert expected.metrics["actor/ppo_kl"] == 20
    assert got.metrics["actor/ppo_kl"] == 25
    far = Batch(torch.full((1, 1), -12.0), torch.zeros(1, 1), -torch.ones(1, 1), mask)
    expected, got = (run(name, far, "token-mean", actor_config()) for name in ("gspo", "dapo_kernels/gspo"))
    assert expected.loss.item() == pytest.approx(torch.tensor(10.0).exp().item())
    assert got.loss.item() == pytest.approx(torch.tensor(12.0).exp().item())


def test_gspo_differentiates_the_sequence_ratio() -> None:
    """verl's "gspo" is GSPO-token, which has another gradient where advantages differ within a sequence."""
    batch, config = random_batch(12, per_token=True), actor_config()
    batch = batch._replace(log_prob=batch.old_log_prob + 0.01 * (batch.log_prob - batch.old_log_prob))
    theirs, tokens, sequence = (
        run(name, batch, "seq-mean-token-mean", config)
        for name in ("gspo", "dapo_kernels/gspo_token", "dapo_kernels/gspo")
    )
    assert_same(tokens, theirs)
    torch.testing.assert_close(sequence.loss, theirs.loss)
    assert not torch.allclose(sequence.gradient, theirs.gradient, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", NO_CLIP_WITHOUT_ADVANTAGE)
def test_no_clip_is_counted_without_an_advantage(name: str) -> None:
    batch = random_batch(14)
    batch = batch._replace(advantages=torch.zeros_like(batch.advantages))
    assert run(name, batch, "token-mean", actor_config()).metrics["actor/pg_clipfrac"] > 0
    assert run(ours.PREFIX + name, batch, "token-mean", actor_config()).metrics["actor/pg_clipfrac"] == 0


def test_gmpo_is_a_mean_over_responses_that_train() -> None:
    """verl's ``geo_mean`` knows no other mean, and counts a row without a token; its metric counts what is out of
    range whether or not the sign of the advantage lets it be clipped."""
    batch, config = random_batch(15), actor_config(clip_ratio_low=0.4, clip_ratio_high=0.4)
    weights = (torch.rand(6, 1) + 0.5).expand_as(batch.log_prob)
    expected = run("geo_mean", batch, "token-mean", config, weights)
    got = run("dapo_kernels/gmpo", batch, "seq-mean-token-mean", config, weights)
    responses = batch.response_mask.any(-1).sum().item()
    assert responses == 5
    torch.testing.assert_close(got.loss, expected.loss * 6 / responses)
    torch.testing.assert_close(got.gradient, expected.gradient * 6 / responses)
    assert got.metrics["actor/ppo_kl"] == pytest.approx(expected.metrics["actor/ppo_kl"], rel=1e-5)
    assert (
        0
        < got.metrics["actor/pg_clipfrac"]
        < sum(expected.metrics[key] for key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"))
    )


def test_dro_weighs_the_policy_term_alone() -> None:
    batch, nothing = random_batch(16), torch.zeros(6, 23)
    assert run("dro", batch, "token-mean", actor_config(), nothing).loss == 0
    distance = (batch.log_prob - batch.old_log_prob)[batch.response_mask]
    got = run("dapo_kernels/dro", batch, "token-mean", actor_config(), nothing)
    torch.testing.assert_close(got.loss, 0.05 * distance.square().mean())


# ---- refusals, warnings, registration ----


def test_every_objective_is_registered() -> None:
    for name in OBJECTIVES:
        assert core_algos.get_policy_loss_fn(f"dapo_kernels/{name}").__name__ == f"{name}_policy_loss"


def test_top_entropy_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="entropy"):
        run("dapo_kernels/top_entropy", random_batch(0), "token-mean", actor_config())


def test_dro_without_a_beta_is_refused() -> None:
    for beta in (None, 0.0):
        with pytest.raises(ValueError, match="dro_beta"):
            run("dapo_kernels/dro", random_batch(0), "token-mean", actor_config(covariance={"dro_beta": beta}))


def test_a_missing_global_count_is_refused() -> None:
    for mode, name in [("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")]:
        with pytest.raises(ValueError, match=f"dp_size=2.*{name}"):
            run("dapo_kernels/dapo", random_batch(0), mode, actor_config({"dp_size": 2}))
    with pytest.raises(ValueError, match="aggregate"):
        run("dapo_kernels/dapo", random_batch(0), "mean", actor_config())
    with pytest.raises(ValueError, match="config"):
        run("dapo_kernels/dapo", random_batch(0), "token-mean", None)


def test_a_config_that_is_not_the_papers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ours._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "dapo_kernels.integrations.verl"):
        run("dapo_kernels/dapo", random_batch(0), "token-mean", actor_config())
        assert not caplog.records
        for _ in range(2):
            run("dapo_kernels/gspo", random_batch(0), "seq-mean-token-mean", actor_config(clip_ratio_low=3e-4))
    assert len(caplog.records) == 1
    assert "clip_high=0.28 (the objective's own: 0.0004)" in caplog.text


@pytest.mark.parametrize("name", ["dapo", "cispo", "reinforce"])
@pytest.mark.parametrize("by_std", [True, False])
def test_the_mean_over_prompts(name: str, by_std: bool) -> None:
    """DAPO's eq. 8 as printed: weighted advantages and seq-mean-token-sum, over the whole batch and in two parts."""
    batch = random_batch(11, rows=6)
    mask = batch.response_mask
    index = np.array(["b", "a", "b", "a", "c", "c"], dtype=object)  # row 3 has no token
    rewards = torch.where(mask, torch.rand(mask.shape, generator=torch.Generator().manual_seed(4)), 0.0)
    config: Any = {"norm_adv_by_std_in_grpo": by_std}
    estimate = core_algos.get_adv_estimator_fn(f"{ours.PREFIX}grpo_prompt_mean")
    advantages, returns = estimate(token_level_rewards=rewards, response_mask=mask, index=index, config=config)
    plain, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=by_std)
    assert torch.equal(returns, plain)

    log_prob = batch.log_prob.clone().requires_grad_()
    means = []
    for prompt in ("a", "b", "c"):
        rows = [i for i in range(6) if index[i] == prompt]
        parts = [(i, t) for i in rows for t in range(mask.shape[1]) if mask[i, t]]
        terms = []
        for i, t in parts:
            a, r = plain[i, t], torch.exp(log_prob[i, t] - batch.old_log_prob[i, t])
            if name == "dapo":
                terms.append(
                    -torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
                    if a > 0
                    else -torch.maximum(torch.minimum(r * a, r.clamp(0.8, 1.28) * a), 3.0 * a)
                )
            elif name == "cispo":
                terms.append(-r.detach().clamp(0.8, 1.28) * a * log_prob[i, t])
            else:
                terms.append(-a * log_prob[i, t])
        means.append(torch.stack(terms).sum() / len(terms))
    expected = torch.stack(means).mean()
    expected.backward()
    assert log_prob.grad is not None

    total, gradient = 0.0, torch.zeros_like(log_prob)
    for rows in (slice(0, 2), slice(2, 6)):  # as two micro-batches, on two ranks
        part = Batch(*(x[rows] for x in batch._replace(advantages=advantages)))
        got = run(ours.PREFIX + name, part, "seq-mean-token-sum", actor_config({"dp_size": 2, "global_batch_size": 6}))
        total += got.loss.item() / 2
        gradient[rows] = got.gradient / 2
    assert total == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, log_prob.grad, rtol=1e-5, atol=1e-7)


def test_external_modules_of_the_driver() -> None:
    """verl imports what this variable names in every process, the driver too, which estimates advantages."""
    name = f"{ours.PREFIX}grpo_prompt_mean"
    code = f"from verl.trainer.ppo import core_algos; core_algos.get_adv_estimator_fn({name!r})"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "dapo_kernels.integrations.verl"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
