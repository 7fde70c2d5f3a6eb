"""The distillation and preference losses beside TRL's own: same value, gradients and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_kernels import linear_distillation_loss, linear_preference_loss, summarize

T, V, H, K = 24, 61, 16, 12
# Both stack the chosen responses over the rejected ones.
STACKED = torch.tensor([[0, 3], [1, 4], [2, 5]])
METRICS = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "logprob_chosen": "logps/chosen",
    "logprob_rejected": "logps/rejected",
    "entropy": "entropy",
}


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_distillation(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    generator = torch.Generator().manual_seed(1)
    shapes = ((T, H), (V, H), (T, K), (V, K))
    states = [torch.randn(shape, generator=generator) / shape[1] ** 0.25 for shape in shapes]
    labels = torch.randint(V, (T,), generator=generator)
    labels[::3] = -100
    hidden, weight = (x.requires_grad_() for x in states[:2])
    logits, of_ref = states[0] @ states[1].t(), states[2] @ states[3].t()
    expected = gkd.GKDTrainer.generalized_jsd_loss(logits, of_ref, labels, beta=beta, temperature=0.7)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight))
    loss = linear_distillation_loss(*states, mask=labels != -100, beta=beta, temperature=0.7).loss
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    found = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(found, expected_gradients, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")
    from datasets import Dataset
    from trl_runs import load

    from dapo_runner.run.tiny_model import make_tokenizer

    reference, generator = load(model), torch.Generator().manual_seed(1)
    for parameter in reference.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    rows = {"prompt": ["1+2=", "13+4=", "25+31="], "chosen": ["3", "17", "56"], "rejected": ["12", "8", "1234"]}
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "beta": 0.3}
    return trl.DPOTrainer(
        model=str(model),
        ref_model=reference,
        args=trl.DPOConfig(output_dir=str(tmp_path_factory.mktemp("dpo")), **settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=make_tokenizer(),
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_preferences_are_trls(trainer: Any, loss_type: str) -> None:
    trainer.loss_types = [loss_type]
    trainer._metrics["train"].clear()
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    model = trainer.model.train()
    loss = trainer.compute_loss(model, dict(inputs))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
    ids, attention = inputs["input_ids"], inputs["attention_mask"]

    def body(of: Any) -> Tensor:
        return of.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, :-1]

    with torch.no_grad():
        ref_logits = trainer.ref_model.lm_head(body(trainer.ref_model))
        ref = ref_logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    options = {"pairs": STACKED, "mask": inputs["completion_mask"][:, 1:].bool(), "beta": 0.3, "loss_type": loss_type}
    out = linear_preference_loss(body(model), model.lm_head.weight, ids[:, 1:], ref, **options, entropy=True)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(out.loss, list(model.parameters()))
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)
    figures, expected = summarize(out.metrics), {name: logged[other] for name, other in METRICS.items()}
    assert {name: figures[name] for name in METRICS} == pytest.approx(expected, rel=1e-4, abs=1e-6)
