"""verl's fused forward and whole actor loss with this package's parts in place of verl's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

_NEEDED = "verl's import chain: pip install --no-deps -r tests/integrations/requirements-verl.txt"
pytest.importorskip("verl.trainer.ppo.core_algos", reason=_NEEDED, exc_type=ImportError)

from verl.utils.experimental import torch_functional  # noqa: E402

import dapo_kernels.integrations.verl as ours  # noqa: E402

THEIRS = torch_functional.FusedLinearForPPO


def head_inputs(dtype: torch.dtype, shape: tuple[int, ...] = (1, 37)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, 24, generator=generator)
    weight = torch.randn(101, 24, generator=generator) / 3
    targets = torch.randint(0, 101, shape, generator=generator)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()  # the same numbers in every dtype
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def statistics(layer: torch.nn.Module, dtype: torch.dtype, temperature: float) -> tuple[Tensor, ...]:
    """Log-probs, entropy, and the gradients of hidden and weight of a mixture of both."""
    hidden, weight, targets = head_inputs(dtype)
    logprobs, entropy = layer(hidden_states=hidden, vocab_weights=weight, input_ids=targets, temperature=temperature)
    assert logprobs.shape == entropy.shape == targets.shape
    wave = torch.linspace(-1, 1, targets.numel()).view(targets.shape)
    ((wave * logprobs).sum() + 0.3 * (wave.flip(-1) * entropy).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_size", [None, 10])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fused_linear_agrees_with_verls(temperature: float, chunk_size: int | None) -> None:
    expected = statistics(THEIRS(), torch.float32, temperature)
    got = statistics(ours.FusedLinear(chunk_size), torch.float32, temperature)
    for mine, verls in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, verls, rtol=1e-5, atol=2e-6)


def test_fused_linear_in_bfloat16_is_no_further_from_the_truth_than_verls() -> None:
    truth = statistics(ours.FusedLinear(), torch.float32, 0.6)
    expected = statistics(THEIRS(), torch.bfloat16, 0.6)
    got = statistics(ours.FusedLinear(), torch.bfloat16, 0.6)
    assert got[0].dtype == got[1].dtype == torch.float32
    for mine, verls, exact in zip(got, expected, truth, strict=True):
        assert (mine - exact).abs().mean() <= 1.1 * (verls - exact).abs().mean()
        assert (mine - exact).abs().max() <= 1.5 * (verls - exact).abs().max()


def test_other_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="impl_backend"):
        ours.FusedLinear(impl_backend="liger")


def fused_forward(model: Any, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    model.zero_grad()
    output = model(input_ids=input_ids, temperature=0.8, return_dict=True)
    (output.log_probs.sum() + 0.1 * output.entropy.sum()).backward()
    return output.log_probs.detach(), output.entropy.detach(), model.lm_head.weight.grad.clone()


def test_install_serves_verls_fused_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    assert torch_functional.FusedLinearForPPO is THEIRS  # importing the integration patched nothing

    class Llama(LlamaForCausalLM):  # verl replaces the class's forward
        pass

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Llama(LlamaConfig(vocab_size=61, **sizes))
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    input_ids = torch.randint(0, 61, (1, 20))
    expected = fused_forward(model, input_ids)

    calls = []
    monkeypatch.setattr(torch_functional, "FusedLinearForPPO", THEIRS)  # put back afterwards
    monkeypatch.setattr(
        ours, "linear_token_logprobs", lambda *a, **k: calls.append(1) or _linear_token_logprobs(*a, **k)
    )
    ours.install_fused_linear()
    for mine, verls in zip(fused_forward(model, input_ids), expected, strict=True):
        torch.testing.assert_close(mine, verls, rtol=1e-5, atol=1e-5)
    assert calls == [1]


_linear_token_logprobs = ours.linear_token_logprobs


def actor_loss(loss_mode: str, batch_info: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, float]]:
    """verl's ``ppo_loss``: policy loss, entropy bonus and reference KL of a padded batch of two responses."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    generator = torch.Generator().manual_seed(0)
    prompts, lengths = 2, torch.tensor([[5], [3]])
    mask = torch.arange(5) < lengths
    total = int((lengths + prompts).sum())
    log_probs = -torch.rand(total, generator=generator)
    log_probs.requires_grad_()
    data = TensorDict(
        {
            "prompts": torch.ones(2, prompts, dtype=torch.long),
            "responses": torch.ones(2, 5, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(2, prompts, dtype=torch.bool), mask], dim=1).long(),
            "response_mask": mask,
            "old_log_probs": -torch.rand(2, 5, generator=generator),
            "ref_log_prob": -torch.rand(2, 5, generator=generator),
            "rollout_is_weights": torch.rand(2, 5, generator=generator) * 2,
            "advantages": torch.randn(2, 5, generator=generator),
        },
        batch_size=2,
    )
    for key, value in batch_info.items():
        tu.assign_non_tensor_data(data, key, value)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_high=0.28,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
    )
    outputs = {"log_probs": log_probs, "entropy": torch.rand(total, generator=generator)}
    loss, metrics = ppo_loss(config, outputs, data)
    loss.backward()
    assert log_probs.grad is not None
    numbers = {key: getattr(value, "values", [value])[0] for key, value in metrics.items()}
    return loss.detach(), log_probs.grad, numbers


@pytest.mark.parametrize("dp_size", [1, 4])
def test_verls_actor_loss(dp_size: int) -> None:
    """verl subtracts its entropy bonus from the policy loss in place."""
    info = {"dp_size": dp_size, "batch_num_tokens": 40, "global_batch_size": 9}
    expected, got = (actor_loss(name, info) for name in ("vanilla", "dapo_kernels/dapo"))
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])
    assert got[2] == pytest.approx(expected[2], rel=1e-5)


def test_external_lib_registers() -> None:
    """Both ways that verl imports modules by name, in a fresh process."""
    ask = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; print(f('dapo_kernels/dapo').__name__)"
    by_config = f"from verl.utils.import_utils import import_external_libs as g; g({ours.__name__!r}); {ask}"
    for code, variables in ((ask, {"VERL_USE_EXTERNAL_MODULES": ours.__name__}), (by_config, {})):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=False
        )
        assert done.stdout.split()[-1:] == ["dapo_policy_loss"], done.stderr
