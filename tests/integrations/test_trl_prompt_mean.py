"""``DapoGRPOTrainer(aggregate="prompt-mean-token-mean")``: eq. 8 of the DAPO paper as printed, over TRL's batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")

import torch
from ranks import on_ranks
from torch import Tensor
from trl_runs import ON_POLICY, Kept, Rollouts, load, save_tiny_model, train

from dapo_kernels.integrations import trl as ours

PROMPT_MEAN = {"aggregate": "prompt-mean-token-mean"}
LEARNING_RATE = 20.0


def eq_8(network: Any, batches: list[dict[str, Any]], generations: int) -> Tensor:
    """Eq. 8 on-policy, where the ratio is 1 with its gradient; ``batches`` of the ranks, in their order."""
    per_completion = []
    for batch in batches:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        for i in range(len(mask)):
            ids = torch.cat([batch["prompt_ids"][i], batch["completion_ids"][i]])[None]
            seen = torch.cat([batch["prompt_mask"][i], batch["completion_mask"][i]])[None]
            logits = network(input_ids=ids, attention_mask=seen).logits[0, :-1].double()
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][-mask.shape[1] :]
            kept = logprobs[mask[i].bool()]
            per_completion.append([-batch["advantages"][i] * (x - x.detach()).exp() for x in kept])
    means = []
    for start in range(0, len(per_completion), generations):
        terms = [term for completion in per_completion[start : start + generations] for term in completion]
        if terms:
            means.append(torch.stack(terms).sum() / len(terms))
    return torch.stack(means).mean()


def assert_step(before: dict[str, Tensor], after: dict[str, Tensor], network: Any, batches: list[Any]) -> None:
    """One update of SGD on eq. 8 with four completions of a prompt."""
    eq_8(network, batches, 4).backward()
    for name, parameter in network.named_parameters():
        step = -LEARNING_RATE * parameter.grad
        assert float(step.abs().max()) > 1e-3
        torch.testing.assert_close(after[name] - before[name], step, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("rollouts", [{}, {"masked": True}])
def test_an_update(tmp_path: Path, model: Path, rollouts: dict[str, bool]) -> None:
    """Completions of one prompt lie in different micro-batches: TRL shuffles them."""
    options = ON_POLICY | {"max_steps": 1, "learning_rate": LEARNING_RATE, "mask_truncated_completions": True}
    run = train(Kept, model, tmp_path, Rollouts(**rollouts), **options, loss_type="dapo", trainer_options=PROMPT_MEAN)
    (batch,) = run.trainer.batches
    lengths = batch["completion_mask"].sum(1).view(-1, 4).sum(1)
    assert len(set(lengths.tolist())) > 1  # the mean over tokens is another
    assert_step(run.start, run.weights, load(model), [batch])


def on_a_rank(rank: int, folder: Path) -> None:
    """Three completions of a prompt on one rank and one on the other."""
    rollouts = Rollouts()
    rollouts.random.seed(rank)
    options = {"per_device_train_batch_size": 3, "num_generations": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    settings = {"learning_rate": LEARNING_RATE, "loss_type": "dapo", "trainer_options": PROMPT_MEAN}
    run = train(Kept, folder / "model", folder / "run", rollouts, **options, **settings)
    torch.save((run.trainer.batches[0], run.start, run.weights), folder / f"rank {rank}.pt")


@pytest.mark.ranks
def test_an_update_on_two_ranks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    on_ranks(2, on_a_rank, tmp_path)
    (first, before, after), (second, _, other) = (torch.load(tmp_path / f"rank {rank}.pt") for rank in range(2))
    assert first["num_prompts"] == second["num_prompts"] == 3
    assert all(torch.equal(after[name], other[name]) for name in after)
    before, after = ({name.removeprefix("module."): x for name, x in weights.items()} for weights in (before, after))
    assert_step(before, after, load(tmp_path / "model"), [first, second])


def test_a_prompt_without_a_token_does_not_count() -> None:
    accelerator = SimpleNamespace(process_index=0, gather=lambda x: x)
    trainer: Any = SimpleNamespace(accelerator=accelerator, model=SimpleNamespace(training=True), num_generations=2)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]])
    counts = ours.prompt_counts(trainer, {"completion_mask": mask})
    assert counts["group_tokens"].tolist() == [3, 3, 0, 0, 3, 3]
    assert counts["num_prompts"] == 2


def test_evaluation(tmp_path: Path, model: Path) -> None:
    """With as many completions of a prompt as evaluation takes."""
    options = ON_POLICY | {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    settings = {"per_device_eval_batch_size": 4, "learning_rate": 0.0, "loss_type": "dapo"}
    run = train(Kept, model, tmp_path, Rollouts(), **options, **settings, trainer_options=PROMPT_MEAN)
    evaluated = run.trainer.batches[-1]
    assert len(evaluated["advantages"]) == 4
    found = next(entry["eval_loss"] for entry in run.log if "eval_loss" in entry)
    assert found == pytest.approx(eq_8(load(model), [evaluated], 2).item(), rel=1e-5, abs=1e-7)
