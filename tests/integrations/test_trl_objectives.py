"""Rows of the table against TRL's formula for the same loss, on log-probs: LUSPO, VESPO, GMPO, ``delta`` and the
off-policy mask."""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from dapo_kernels import policy_loss

ROWS, WIDTH = 7, 11
# TRL's settings; our row, with what those settings change of it; how far log-probs are from the old ones.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3},
        {"objective": "luspo"},
        0.01,
    ),
    "vespo": ({"loss_type": "vespo"}, {"objective": "vespo"}, 0.3),
    "gmpo": ({"epsilon_low": 0.4, "epsilon_high": 0.4}, {"objective": "gmpo"}, 0.6),
    "delta": ({"loss_type": "grpo", "delta": 1.5, "beta": 0.001}, {"objective": "two_sided", "dual_clip": 1.5}, 0.6),
    "off-policy mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
        {"objective": "opsm", "off_policy_mask": 0.1},
        0.6,
    ),
}


def trl_loss(logprobs: Tensor, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    """TRL's ``_compute_loss`` for these log-probs, as in an evaluation: nothing accumulates."""
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "off_policy_mask_threshold": None,
    }
    stub = SimpleNamespace(
        **{**defaults, "epsilon_low": 0.2, "epsilon_high": 0.2, **settings},
        args=SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False, **vespo),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=False),
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        aux_loss_enabled=False,
        use_vllm=False,
        top_entropy_quantile=1.0,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros_like(inputs["completion_mask"])
    inputs = {**inputs, "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids}
    trainer = GRPOTrainer if "loss_type" in settings else GMPOTrainer
    return trainer._compute_loss(stub, None, inputs)


@pytest.mark.parametrize("case", CASES)
def test_the_row_is_trls_loss(case: str) -> None:
    settings, ours, spread = CASES[case]
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) - 6.0
    now = old + spread * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    reference = old + 0.1
    inputs = {
        "completion_mask": mask.long(),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    theirs, mine = now.clone().requires_grad_(), now.clone().requires_grad_()
    expected = trl_loss(theirs, inputs, **settings)
    expected.backward()
    beta = {"ref_logprobs": reference} if settings.get("beta") else {}
    out = policy_loss(mine, old, advantages, mask=mask, **ours, **beta)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    trains = (theirs.grad != 0) & mask
    assert trains.any()
    cut = out.metrics["clip_dual"] > 0 if case == "delta" else (mask & ~trains).any()
    assert case == "vespo" or cut
