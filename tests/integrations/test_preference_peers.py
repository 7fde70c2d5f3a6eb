"""The preference losses against TRL's DPOTrainer and Liger's fused DPO: same loss, gradients and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_kernels import linear_preference_loss, summarize

# Both stack the chosen responses over the rejected ones.
STACKED = torch.tensor([[0, 3], [1, 4], [2, 5]])


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge"])
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "none"])
def test_liger(loss_type: str, reference: bool) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed (liger-kernel)")
    g = torch.Generator().manual_seed(0)
    hidden, ref_hidden = (torch.randn(6, 7, 8, generator=g) for _ in range(2))
    weight, ref_weight = (torch.randn(31, 8, generator=g) for _ in range(2))
    target_ids = torch.randint(31, (6, 7), generator=g)
    target_ids[torch.rand(6, 7, generator=g) < 0.3] = -100
    mask = target_ids != -100

    theirs = liger.LigerFusedLinearDPOLoss(
        beta=0.2, loss_type=loss_type, compiled=False, use_ref_model=reference, average_log_prob=False
    )
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, (chosen, rejected, *_, chosen_rewards, rejected_rewards) = theirs(
        w, x, target_ids, ref_input=ref_hidden if reference else None, ref_weight=ref_weight if reference else None
    )
    loss.backward()

    ref = (ref_hidden @ ref_weight.T).log_softmax(-1).gather(-1, target_ids.clamp(min=0)[..., None])[..., 0]
    y, v = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_preference_loss(
        y, v, target_ids, ref if reference else None, pairs=STACKED, mask=mask, beta=0.2, loss_type=loss_type
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        out.rewards, torch.stack([chosen_rewards, rejected_rewards], 1).detach(), rtol=1e-5, atol=1e-5
    )
    figures = summarize(out.metrics)
    assert figures["logprob_chosen"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert figures["logprob_rejected"] == pytest.approx(float(rejected.mean()), rel=1e-5)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(v.grad, w.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")
    from datasets import Dataset
    from trl_runs import load, save_tiny_model

    from dapo_runner.run.tiny_model import make_tokenizer

    folder: Path = save_tiny_model(tmp_path_factory.mktemp("dpo"))
    reference = load(folder)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    rows = {"prompt": ["1+2=", "13+4=", "25+31="], "chosen": ["3", "17", "56"], "rejected": ["12", "8", "1234"]}
    args = trl.DPOConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.3
    )
    return trl.DPOTrainer(
        model=str(folder),
        ref_model=reference,
        args=args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=make_tokenizer(),
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_trl(trainer: Any, loss_type: str) -> None:
    trainer.loss_types = [loss_type]
    trainer._metrics["train"].clear()
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    model = trainer.model.train()
    model.zero_grad()
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    theirs = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}

    model.zero_grad()
    ids, attention = inputs["input_ids"], inputs["attention_mask"]
    mask = inputs["completion_mask"][:, 1:].bool()

    def body(of: Any) -> Tensor:
        return of.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, :-1]

    with torch.no_grad():
        ref_logits = trainer.ref_model.lm_head(body(trainer.ref_model))
        ref = ref_logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    out = linear_preference_loss(
        body(model), model.lm_head.weight, ids[:, 1:], ref,
        pairs=STACKED, mask=mask, beta=0.3, loss_type=loss_type, entropy=True,
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    names = {
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "logprob_chosen": "logps/chosen",
        "logprob_rejected": "logps/rejected",
        "entropy": "entropy",
    }
    figures = summarize(out.metrics)
    assert {name: figures[name] for name in names} == pytest.approx(
        {name: logged[other] for name, other in names.items()}, rel=1e-4, abs=1e-6
    )
