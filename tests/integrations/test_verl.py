"""verl's losses, advantages and fused linear layer against this package's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

_NEEDED = "verl's import chain: make .venv/.verl"
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=_NEEDED, exc_type=ImportError)

import torch.distributed as dist  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from ranks import on_ranks  # noqa: E402
from verl.models.transformers.monkey_patch import patch_forward_with_backends  # noqa: E402
from verl.utils.experimental import torch_functional  # noqa: E402
from verl.utils.fsdp_utils import apply_fsdp2  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402

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


counterparts = pytest.mark.parametrize(("theirs", "name"), COUNTERPARTS)


@counterparts
def test_same_as_verls_own(theirs: str, name: str) -> None:
    for i, mode in enumerate(AGGREGATIONS):
        for seed, batch_info in ((2 * i, {}), (2 * i + 1, GLOBAL)):
            batch = random_batch(seed, per_token=name not in ("gspo", "kl_cov"))
            # A share of 1 takes every candidate, so that the random choice is none.
            covariance = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.1}
            config = actor_config(batch_info, covariance, loss_scale_factor=batch_info.get("loss_scale_factor"))
            weights = torch.rand(batch.log_prob.shape, generator=torch.Generator().manual_seed(seed)) * 2
            weights = weights[:, :1].expand_as(weights) if name == "gspo" else weights
            for weight in (None,) if name in UNWEIGHTED else (None, weights):
                expected = run(theirs, batch, mode, config, weight)
                got = run(ours.PREFIX + name, batch, mode, config, weight)
                assert_same(got, expected)
                assert expected.gradient.abs().sum() > 0
                assert set(got.metrics) == set(expected.metrics) | ({"actor/ppo_kl"} if name == "reinforce" else set())


EDGES: dict[str, Callable[[Batch], Batch]] = {
    "on-policy": lambda x: x._replace(log_prob=x.old_log_prob.clone()),
    "no advantage": lambda x: x._replace(advantages=torch.zeros_like(x.advantages)),
    "large advantages": lambda x: x._replace(advantages=x.advantages * 1e4),
    "one token": lambda x: Batch(*(tensor[:1, :1] for tensor in x)),
    "integer mask": lambda x: x._replace(response_mask=x.response_mask.long()),
    "certain tokens": lambda x: x._replace(log_prob=torch.zeros_like(x.log_prob)),
}
COUNTS = {"batch_num_tokens": torch.tensor(977), "global_batch_size": torch.tensor(31), "dp_size": 4}
SETTINGS: list[dict[str, Any]] = [
    *({"clip_ratio_c": 1.5, "edge": edge} for edge in EDGES),
    {"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": None},
    {"clip_ratio_c": 1.2},
    {"clip_ratio_c": 10.0, "tau_pos": 0.7, "tau_neg": 1.9},
    {"batch_info": COUNTS},
    {"clip_ratio_low": 10.0},  # as verl's CISPO recipe has it: clips nothing
]


@counterparts
def test_same_at_the_edges_and_with_other_settings(theirs: str, name: str) -> None:
    for settings in SETTINGS:
        if "clip_ratio_low" in settings and settings["clip_ratio_low"] == 10.0 and name != "cispo":
            continue  # verl's other losses are not given such a bound
        fields = dict(settings)
        edge = fields.pop("edge", None)
        batch = random_batch(7) if edge is None else EDGES[edge](random_batch(7))
        # kl_cov: equal covariances leave the choice open, so take all tokens.
        covariance = {"clip_cov_ratio": 1.0, "kl_cov_ratio": 1.0, "ppo_kl_coef": 0.3}
        config = actor_config(covariance=covariance, **fields)
        expected = run(theirs, batch, "token-mean", config)
        got = run(ours.PREFIX + name, batch, "token-mean", config)
        if edge == "no advantage" and name in NO_CLIP_WITHOUT_ADVANTAGE:  # on purpose: nothing was clipped
            assert expected.metrics.pop("actor/pg_clipfrac") > 0
            assert got.metrics["actor/pg_clipfrac"] == 0
            expected.metrics.pop("actor/pg_clipfrac_lower")
        assert_same(got, expected)
        if name == "dapo" and settings == {"clip_ratio_c": 1.2}:
            assert expected.metrics["actor/pg_clipfrac_lower"] > 0


def test_masked_tokens_may_hold_anything_and_no_token_gives_zero() -> None:
    """verl multiplies by the mask, so that a masked NaN reaches the loss, and divides by the local count, 0."""
    clean, config = random_batch(10), actor_config()
    dirty = clean._replace(log_prob=torch.where(clean.response_mask, clean.log_prob, float("nan")))
    assert run("vanilla", dirty, "seq-mean-token-mean", config).loss.isnan()
    expected = run("vanilla", clean, "seq-mean-token-mean", config)
    assert_same(run("dapo_kernels/dapo", dirty, "seq-mean-token-mean", config), expected)
    empty = clean._replace(response_mask=torch.zeros_like(clean.response_mask))
    assert run("vanilla", empty, "token-mean", config).loss.isnan()
    zero = {"dp_size": 2, "batch_num_tokens": 0, "global_batch_size": 0}
    for name in OBJECTIVES.keys() - {"top_entropy"}:
        got = run(ours.PREFIX + name, empty, "token-mean", actor_config(zero if name == "dapo" else {}))
        assert got.loss == 0
        assert not got.gradient.any()
        assert not any(got.metrics.values())


@pytest.mark.parametrize("per_token", [False, True])
def test_gmpo_is_a_mean_over_responses_that_train(per_token: bool) -> None:
    """verl's counts a row without a token, and as clipped what the sign of the advantage does not let it clip."""
    batch, config = random_batch(15, per_token=per_token), actor_config(clip_ratio_low=0.4, clip_ratio_high=0.4)
    weights = (torch.rand(6, 1) + 0.5).expand_as(batch.log_prob)
    expected = run("geo_mean", batch, "token-mean", config, weights)
    got = run("dapo_kernels/gmpo", batch, "seq-mean-token-mean", config, weights)
    assert batch.response_mask.any(-1).sum() == 5
    torch.testing.assert_close(got.loss, expected.loss * 6 / 5)
    torch.testing.assert_close(got.gradient, expected.gradient * 6 / 5)
    assert got.metrics["actor/ppo_kl"] == pytest.approx(expected.metrics["actor/ppo_kl"], rel=1e-5)
    out_of_range = sum(expected.metrics[key] for key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"))
    assert 0 < got.metrics["actor/pg_clipfrac"] < out_of_range


@pytest.mark.parametrize(
    ("name", "mode", "config", "word"),
    [
        ("top_entropy", "token-mean", actor_config(), "entropy"),
        ("dro", "token-mean", actor_config(covariance={"dro_beta": None}), "dro_beta"),
        ("dro", "token-mean", actor_config(covariance={"dro_beta": 0.0}), "dro_beta"),
        ("dapo", "token-mean", actor_config({"dp_size": 2}), "dp_size=2.*batch_num_tokens"),
        ("dapo", "seq-mean-token-sum", actor_config({"dp_size": 2}), "dp_size=2.*global_batch_size"),
        ("dapo", "mean", actor_config(), "aggregate"),
        ("dapo", "token-mean", None, "config"),
    ],
)
def test_refused(name: str, mode: str, config: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        run(ours.PREFIX + name, random_batch(0), mode, config)


def test_numbers_that_are_not_the_objectives_own_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, ours.__name__):
        run("dapo_kernels/dapo", random_batch(0), "token-mean", actor_config())
        run("dapo_kernels/up", random_batch(0), "token-mean", actor_config(clip_ratio_high=0.7))  # not read
        assert not caplog.records
        for _ in range(2):
            run("dapo_kernels/gspo", random_batch(0), "seq-mean-token-mean", actor_config(clip_ratio_low=1.234e-4))
    assert len(caplog.records) == 1
    assert all(word in caplog.text for word in ("dapo_kernels/gspo", "clip_high=", "0.0004"))


@pytest.mark.parametrize("by_std", [True, False])
def test_the_mean_over_prompts(by_std: bool) -> None:
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
    ratio = (log_prob - batch.old_log_prob).exp()
    clipped = torch.minimum(ratio * plain, ratio.clamp(0.8, 1.28) * plain)
    terms = -torch.where(plain > 0, clipped, torch.maximum(clipped, 3.0 * plain))
    rows_of = [torch.from_numpy(index == prompt) for prompt in "abc"]
    expected = torch.stack([terms[mask & rows[:, None]].mean() for rows in rows_of]).mean()
    expected.backward()
    assert log_prob.grad is not None
    total, gradient = 0.0, torch.zeros_like(log_prob)
    for rows in (slice(0, 2), slice(2, 6)):  # as two micro-batches, on two ranks
        part = Batch(*(x[rows] for x in batch._replace(advantages=advantages)))
        got = run("dapo_kernels/dapo", part, "seq-mean-token-sum", actor_config({"dp_size": 2, "global_batch_size": 6}))
        total += got.loss.item() / 2
        gradient[rows] = got.gradient / 2
    assert total == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, log_prob.grad, rtol=1e-5, atol=1e-7)


def statistics(layer: torch.nn.Module, dtype: torch.dtype, temperature: float) -> tuple[Tensor, ...]:
    """Log-probs, entropy, and the gradients of hidden and weight of a mixture of both."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, 24, generator=generator).bfloat16() for shape in ((1, 37), (101,)))
    hidden, weight = hidden.to(dtype).requires_grad_(), (weight / 3).to(dtype).requires_grad_()
    targets = torch.randint(0, 101, (1, 37), generator=generator)
    logprobs, entropy = layer(hidden_states=hidden, vocab_weights=weight, input_ids=targets, temperature=temperature)
    wave = torch.linspace(-1, 1, targets.numel()).view(targets.shape)
    ((wave * logprobs).sum() + 0.3 * (wave.flip(-1) * entropy).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(("temperature", "chunk_size"), [(1.0, None), (0.6, 10)])
def test_the_fused_linear_layer(temperature: float, chunk_size: int | None) -> None:
    """Verl's in float32, and in bfloat16 no further from that than verl's own."""
    theirs, mine = torch_functional.FusedLinearForPPO(), ours.FusedLinear(chunk_size)
    exact = statistics(theirs, torch.float32, temperature)
    for got, expected in zip(statistics(mine, torch.float32, temperature), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    rounded = [statistics(layer, torch.bfloat16, temperature) for layer in (mine, theirs)]
    assert rounded[0][0].dtype == rounded[0][1].dtype == torch.float32
    for got, verls, expected in zip(*rounded, exact, strict=True):
        assert (got - expected).abs().mean() <= 1.1 * (verls - expected).abs().mean()
        assert (got - expected).abs().max() <= 1.5 * (verls - expected).abs().max()
    with pytest.raises(ValueError, match="impl_backend"):
        ours.FusedLinear(impl_backend="liger")


def fused_model() -> Any:
    """Return a model with verl's fused forward, which it sets in the class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = type("Llama", (LlamaForCausalLM,), {})(LlamaConfig(vocab_size=61, **sizes))
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    return model


def fused_forward(model: Any, rows: slice) -> tuple[Tensor, ...]:
    """Return log-probs and entropy of some of two sequences, and the gradient of the head."""
    model.zero_grad()
    input_ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))[rows]
    output = model(input_ids=input_ids, temperature=0.8, return_dict=True)
    (output.log_probs.sum() + 0.1 * output.entropy.sum()).backward()
    return output.log_probs.detach(), output.entropy.detach(), model.lm_head.weight.grad.clone()


def test_install_serves_verls_fused_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, model = torch_functional.FusedLinearForPPO, fused_model()
    assert theirs is not ours.FusedLinear  # importing the integration patched nothing
    monkeypatch.setattr(torch_functional, "FusedLinearForPPO", theirs)  # restored afterwards
    expected = fused_forward(model, slice(None))
    ours.install_fused_linear()
    assert torch_functional.FusedLinearForPPO is ours.FusedLinear
    torch.testing.assert_close(fused_forward(model, slice(None)), expected, rtol=1e-5, atol=1e-5)


def shard_on_a_rank(rank: int) -> None:
    ours.install_fused_linear()
    logprobs, entropy, gradient = fused_forward(fused_model(), slice(None))
    model = fused_model()
    apply_fsdp2(model, {"mesh": dist.init_device_mesh("cpu", (2,))}, {})
    row = slice(rank, rank + 1)
    *mine, sharded = fused_forward(model, row)
    torch.testing.assert_close([*mine, sharded.full_tensor()], [logprobs[row], entropy[row], gradient / 2])


@pytest.mark.ranks
def test_the_fused_linear_layer_under_fsdp2() -> None:
    """verl shards the head apart; each of two ranks has one of two sequences."""
    on_ranks(2, shard_on_a_rank)


def test_the_settings_of_the_page_are_verls() -> None:
    config = OmegaConf.load(Path(core_algos.__file__).parents[1] / "config" / "_generated_ppo_trainer.yaml")
    OmegaConf.set_struct(config, True)
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    for added, key, value in re.findall(r"^(\+?)([a-z_.]+)=(\S+)$", page, re.MULTILINE):
        OmegaConf.update(config, key, value, force_add=bool(added))
    model, actor, algorithm = config.actor_rollout_ref.model, config.actor_rollout_ref.actor, config.algorithm
    assert model.external_lib == ours.__name__
    assert core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode).__name__ == "dapo_policy_loss"
    assert core_algos.get_adv_estimator_fn(algorithm.adv_estimator) is ours.prompt_mean_advantages
