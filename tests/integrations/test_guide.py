"""Runs every snippet of docs/guide.md, and compares what it shows before with what it shows after."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_batches import VOCAB, gradients, network
from ranks import on_ranks
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import TrainingArguments

import dapo_kernels
from dapo_kernels import linear_dapo_loss

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide.md"
SNIPPETS = {
    name: source
    for name, source in re.findall(r"<!-- (.+?) -->\n```python\n(.+?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
}
PROMPT = 3
WRAPPERS = ["before", "after"] + ["fabric"] * (importlib.util.find_spec("lightning_fabric") is not None)


def batch(rows: int = 6, length: int = 11, seed: int = 1) -> dict[str, Any]:
    """The names of the guide; right-padded responses of 2 to 8 tokens, ratios that reach both clips."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    lengths = torch.randint(PROMPT + 2, length + 1, (rows, 1), generator=generator)
    attention_mask = (torch.arange(length) < lengths).long()
    mask = attention_mask[:, 1:].bool() & (torch.arange(1, length) >= PROMPT)
    with torch.no_grad():
        logits = network()(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    logprobs = target_logprobs(logits, {"input_ids": input_ids})
    noise = torch.randn(rows, length - 1, generator=generator)
    return {
        "torch": torch,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "mask": mask,
        "old_logprobs": logprobs + 0.3 * noise,
        "rollout_logprobs": logprobs + 0.5 * noise.flip(0),
        "advantages": torch.randn(rows, generator=generator),
        "temperature": 0.7,
    }


def target_logprobs(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return logits.log_softmax(-1).gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)


def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Execute a snippet; returns the names it leaves."""
    exec(compile(SNIPPETS[snippet], f"{GUIDE} ({snippet})", "exec"), names)
    return names


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_every_snippet_is_tested() -> None:
    named = re.findall(r"\"(\w+: [\w -]+)\"", Path(__file__).read_text(encoding="utf-8"))
    both = {f"{part}: {which}" for part in ("fsdp", "ranks") for which in ("before", "after")}
    assert set(SNIPPETS) - both - {"ranks: fabric"} <= set(named)
    assert GUIDE.read_text(encoding="utf-8").count("```python") == len(SNIPPETS)


@pytest.mark.parametrize("head", ["plain", "tied", "frozen"])
def test_plain_loop(head: str) -> None:
    model, data = network(tie_word_embeddings=head == "tied"), batch()
    model.lm_head.weight.requires_grad_(head != "frozen")
    before = run("plain: before", model=model, **data)
    expected = gradients(model)
    ratio = before["ratio"][data["mask"]]
    assert (ratio > 1.28).any()
    assert (ratio < 0.8).any()
    for snippet in ("plain: after", "plain: logits"):
        after = run(snippet, model=model, **data)
        assert_close(after["out"].loss, before["loss"])
        assert_close(after["out"].logprobs[data["mask"]], before["logprobs"][data["mask"]])
        assert_close(gradients(model), expected)
    packed = run("plain: packed", model=model, **data)
    assert_close(packed["out"].loss, before["loss"])
    assert_close(gradients(model), expected)
    old = run("plain: old log-probs", model=model, **data)
    assert_close(old["old_logprobs"], torch.where(data["mask"], before["logprobs"], 0.0))
    probabilities = before["logits"].softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    assert_close(old["entropy"], torch.where(data["mask"], entropy, 0.0))


def test_a_reference() -> None:
    """Loss and gradient have 0.04 times k3, the mean of r - 1 - log r with r = reference / policy."""
    torch.manual_seed(3)
    model, reference, data = network(), network(), batch()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        wanted = run("plain: old log-probs", model=reference, **data)["old_logprobs"]
    found = run("plain: reference", model=model, reference=reference, **data)
    gradient = gradients(model)
    plain = run("plain: before", model=model, **data)
    log_r = (wanted - plain["logprobs"])[data["mask"]]
    kl = (log_r.exp() - 1 - log_r).mean()
    assert kl > 0.01
    assert_close(found["out"].loss, plain["loss"] + 0.04 * kl)
    logits = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits[:, :-1].float()
    logprobs = (logits / data["temperature"]).log_softmax(-1)
    log_r = (wanted - logprobs.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1))[data["mask"]]
    (0.04 * (log_r.exp() - 1 - log_r).mean()).backward()  # beside the gradient of plain["loss"]
    assert_close(gradient, gradients(model))


def test_gradient_accumulation() -> None:
    model, data = network(), batch()
    names = {"model": model, "micro_batches": [slice(0, 1), slice(1, 4), slice(4, 6)], **data}
    run("accumulation: before", **names)
    expected = gradients(model)
    run("accumulation: after", **names)
    assert_close(gradients(model), expected)
    run("plain: after", **names | {"temperature": 1.0})  # the whole batch at once
    assert_close(gradients(model), expected)


def train(
    snippet: str,
    folder: Path,
    micro_batches: int = 2,
    bf16: bool = False,
    dtype: torch.dtype = torch.float32,
    takes_count: bool = True,
) -> tuple[dict[str, Tensor], list[float]]:
    """Two updates; the weights and the logged losses and gradient norms."""
    data = batch(rows=8)
    labels = data["input_ids"].clone()
    labels[:, 1:][~data["mask"]] = labels[:, 0] = -100
    columns = {key: data[key] for key in ("input_ids", "attention_mask", "old_logprobs", "advantages")}
    rows = [{**{key: x[i] for key, x in columns.items()}, "labels": labels[i]} for i in range(8)]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": micro_batches, "max_steps": 2}
    quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    update = {"learning_rate": 1e-2, "optim": "sgd", "remove_unused_columns": False, "use_cpu": True}
    arguments = TrainingArguments(str(folder), bf16=bf16, **sizes, **quiet, **update)  # type: ignore[arg-type]
    model = network().to(dtype)
    model.accepts_loss_kwargs = takes_count
    trainer = run(snippet, torch=torch)["DapoTrainer"](model=model, args=arguments, train_dataset=rows)
    if not takes_count:
        run("trainer: count", trainer=trainer)
    trainer.train()
    logged = [log[key] for log in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")]
    assert len(logged) == 4
    return dict(model.named_parameters()), logged


def test_trainer(tmp_path: Path) -> None:
    before, losses = train("trainer: before", tmp_path / "before")
    after, fused_losses = train("trainer: after", tmp_path / "after")
    assert fused_losses == pytest.approx(losses, rel=1e-4)
    assert_same_moves(after, before)


def test_trainer_of_a_model_that_takes_no_count(tmp_path: Path) -> None:
    expected, losses = train("trainer: before", tmp_path / "counted")
    for snippet in ("trainer: before", "trainer: after"):
        weights, found = train(snippet, tmp_path / snippet[9:], takes_count=False)
        assert found == pytest.approx(losses, rel=1e-4)
        assert_same_moves(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainer_in_bfloat16(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As autocast computes it, over weights of either dtype."""
    casts = []

    def observed(hidden: Tensor, *args: Any, **options: Any) -> Any:
        casts.append(torch.is_autocast_enabled(hidden.device.type))
        return linear_dapo_loss(hidden, *args, **options)

    monkeypatch.setattr(dapo_kernels, "linear_dapo_loss", observed)
    _, losses = train("trainer: before", tmp_path / "before", bf16=True, dtype=dtype)
    _, fused_losses = train("trainer: after", tmp_path / "after", bf16=True, dtype=dtype)
    assert fused_losses == pytest.approx(losses, rel=0.05, abs=0.02)
    assert casts == [True] * 4


def assert_same_moves(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    start = dict(network().named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(got[name] - start[name], weight - start[name], rtol=1e-3, atol=1e-7)
    assert any(not torch.equal(weight, start[name]) for name, weight in expected.items())


def test_biased_and_capped_head() -> None:
    model, data = network(), batch()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    model.config.final_logit_softcapping = 2.0
    logits = run("heads: before", model=model, **data)["logits"]  # Llama itself does not cap
    expected = target_logprobs(2.0 * (logits / 2.0).tanh(), data)
    assert_close(run("heads: after", model=model, **data)["stats"].logprobs, expected)


def test_lora_head() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    data = batch()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], lora_alpha=8, init_lora_weights=False)
    model = peft.get_peft_model(network(), config)
    logprobs = target_logprobs(run("lora: before", model=model, **data)["logits"], data)
    ratio, gain = (logprobs - data["old_logprobs"]).exp(), data["advantages"][:, None]
    loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain)[data["mask"]].mean()
    loss.backward()
    expected = gradients(model)
    assert sum("lm_head" in name for name in expected) == 2
    after = run("lora: after", model=model, **data)
    assert_close(after["out"].loss, loss)
    assert_close(gradients(model), expected)


def test_vllm_logprobs() -> None:
    seen = [{5: SimpleNamespace(logprob=-1.25)}, {7: SimpleNamespace(logprob=-0.5), 2: SimpleNamespace(logprob=-0.1)}]
    completion = SimpleNamespace(token_ids=[5, 7], logprobs=seen)
    assert run("vllm: collect", torch=torch)["engine_logprobs"](completion).tolist() == [-1.25, -0.5]

    model, data = network(), batch()
    weight, ids = model.lm_head.weight, {key: data[key] for key in ("input_ids", "attention_mask")}
    names = {"weight": weight, "targets": data["input_ids"][:, 1:], "linear_dapo_loss": linear_dapo_loss, **data}

    def hidden() -> Tensor:
        return model.model(**ids).last_hidden_state[:, :-1]

    logprobs = target_logprobs(hidden() @ weight.T / data["temperature"], data)
    before = run("vllm: before", logprobs=logprobs, **names)
    before["loss"].backward()
    expected = gradients(model)
    assert (before["weights"][data["mask"]] == 2.0).any()
    after = run("vllm: after", hidden=hidden(), **names)
    assert_close(after["out"].loss, before["loss"])
    after["out"].loss.backward()
    assert_close(gradients(model), expected)
    old = run("vllm: old", hidden=hidden(), **names)
    plain = run("plain: before", model=model, **data | {"old_logprobs": data["rollout_logprobs"]})
    assert_close(old["out"].loss, plain["loss"])


def test_a_sampling_mask() -> None:
    model, data = network(), batch()
    kept = torch.rand(*data["mask"].shape, VOCAB, generator=torch.Generator().manual_seed(3)) < 0.2
    kept.scatter_(-1, data["input_ids"][:, 1:, None], True)
    before = run("kept: before", model=model, kept=kept, **data)
    before["logprobs"][data["mask"]].mean().backward()
    expected = gradients(model)
    after = run("kept: after", model=model, kept=kept, **data)
    assert_close(after["logprobs"], torch.where(data["mask"], before["logprobs"], 0.0))
    (after["logprobs"].sum() / data["mask"].sum()).backward()
    assert_close(gradients(model), expected)
    seen = [{5: SimpleNamespace(logprob=-0.1), 7: SimpleNamespace(logprob=-torch.inf)}]
    assert run("kept: vllm", torch=torch)["kept_ids"](SimpleNamespace(logprobs=seen)) == [[5]]


def share_of(rank: int) -> dict[str, Any]:
    """A rank's part of the batch, and its micro-batches within it."""
    part = (slice(0, 2), slice(2, 6))[rank]
    share = {key: x[part] if isinstance(x, Tensor) else x for key, x in batch().items()}
    return share | {"micro_batches": [slice(0, 1), slice(1, 4)]}


def gradients_of_one_process(**changes: Any) -> dict[str, Tensor]:
    model = network()
    run("plain: before", model=model, **batch() | changes)
    return gradients(model)


def wrapping_rank(rank: int) -> None:
    """DDP, accelerate and, where it is installed, Fabric on a share of the batch, against one process on all of it."""
    expected, mine = gradients_of_one_process(), share_of(rank)
    accelerated(mine, expected)
    for snippet in [f"ranks: {which}" for which in WRAPPERS]:
        model = network()
        names = run(snippet, model=model, **mine)
        assert_close(gradients(model), expected)
    old = run("ranks: log-probs", policy=names["policy"], **mine)["old_logprobs"]
    assert_close(old, run("plain: old log-probs", model=network(), **mine)["old_logprobs"])
    model, right = network(), gradients_of_one_process(temperature=1.0)
    run("ranks: trap", model=model, denominator=batch()["mask"].sum() / 2, **mine)
    wrong = gradients(model)
    error = sum((wrong[name] - x).square().sum() for name, x in right.items())
    error = (error / sum(x.square().sum() for x in right.values())).sqrt()
    assert error > 0.9  # what the page says of it


def accelerated(mine: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """One clipped update, of the gradients that one process has."""
    model, used = network(), []
    hook = register_optimizer_step_pre_hook(
        lambda *_: used.append({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    names = run("ranks: accelerate", model=model, **mine)
    hook.remove()
    norm = torch.stack([x.norm() for x in expected.values()]).norm()
    assert_close(names["norm"], norm)
    assert norm > 1
    (got,) = used
    assert_close(got, {name: x / norm for name, x in expected.items()})
    assert names["trained"] is model
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("rows", [6, 8])
def test_windows_of_a_loader(rows: int) -> None:
    """Four micro-batches to an update: two updates, each at its last one, also where the last one is short."""
    masks = batch(rows)["mask"]
    loader = torch.utils.data.DataLoader([{"mask": row} for row in masks])  # type: ignore[arg-type, var-annotated]
    seen: dict[str, Any] = {"torch": torch, "loader": loader}
    totals, live, syncs = [], [], []

    def update(total: Tensor, window: list[dict[str, Tensor]]) -> None:
        totals.append(int(total))
        live.append(sum(int(item["mask"].sum()) for item in window))
        for _ in window:
            with seen["accelerator"].accumulate(torch.nn.Linear(1, 1)):
                syncs.append(seen["accelerator"].sync_gradients)

    seen["update"] = update
    exec(SNIPPETS["ranks: windows"], seen)
    assert totals == live == [int(masks[:4].sum()), int(masks[4:].sum())]
    assert syncs == [False, False, False, True] * 2


def ids_of(names: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return names["input_ids"][:, :-1], names["input_ids"][:, 1:]


def fsdp_rank(rank: int) -> None:
    """The FSDP2 snippets on a share of the batch, against one process on all of it."""
    mine, expected = share_of(rank), gradients_of_one_process(temperature=1.0)
    for which in ("before", "after"):
        model = network()
        names = run(f"fsdp: {which}", model=model, **mine)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, torch.distributed.tensor.DTensor)
            assert_close(parameter.grad.full_tensor(), expected[name])  # type: ignore[union-attr]
    names = run("fsdp: bfloat16", model=network(), PolicyLoss=names["PolicyLoss"], torch=torch) | mine
    out = names["policy"](*ids_of(mine), names["old_logprobs"], names["advantages"], mask=names["mask"])
    assert out.loss.dtype == torch.float32
    distance = (names["old_logprobs"] - out.logprobs)[names["mask"]].sum()
    assert_close(out.metrics["approx_kl"], distance)  # of the old log-probs as they were, not rounded
    out.loss.backward()
    assert names["model"].lm_head.weight.grad.full_tensor().isfinite().all()


def split_rank(rank: int) -> None:
    """Both snippets on half of the positions, which cuts a sequence, against one process on all of them."""
    data, n_rows, length = batch(rows=5), 5, 10
    tokens = {name: data[name].flatten() for name in ("mask", "old_logprobs")}
    tokens["target_ids"] = data["input_ids"][:, 1:].flatten()
    tokens["advantages"] = data["advantages"].repeat_interleave(length)
    part = slice(25 * rank, 25 * rank + 25)
    more = {"cu_seqlens": torch.arange(n_rows + 1, dtype=torch.int32) * length, "n_sequences": n_rows}
    more |= {"temperature": 0.7, "group": torch.distributed.new_group([0, 1])}

    def gradients_of(which: str, **options: Any) -> dict[str, Tensor]:
        model = network()
        ids = {key: data[key] for key in ("input_ids", "attention_mask")}
        hidden, weight = model.model(**ids).last_hidden_state[:, :-1].flatten(0, 1), model.lm_head.weight
        if which == "one process":
            linear_dapo_loss(hidden, weight, **tokens, temperature=0.7, **options).loss.backward()
            return gradients(model)
        names = {name: x[part] for name, x in tokens.items()} | {f"all_{name}": x for name, x in tokens.items()}
        run(which, torch=torch, hidden=hidden[part], weight=weight, **names, **more)
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
        return gradients(model)

    assert_close(gradients_of("split: tokens"), gradients_of("one process"))
    now = target_logprobs(network()(input_ids=data["input_ids"]).logits[:, :-1].detach() / 0.7, data).flatten()
    tokens["old_logprobs"] = now + 2e-3 * torch.randn(n_rows * length, generator=torch.Generator().manual_seed(2))
    sequences = gradients_of("one process", objective="gspo", cu_seqlens=more["cu_seqlens"])
    assert all(x.any() for x in sequences.values())
    assert_close(gradients_of("split: sequences"), sequences)


def train_on_a_rank(rank: int, folder: Path) -> None:
    wrapping_rank(rank)
    fsdp_rank(rank)
    split_rank(rank)
    weights, _ = train("trainer: after", folder / f"run{rank}", micro_batches=2)
    torch.save(weights, folder / f"{rank}.pt")


@pytest.mark.ranks
def test_snippets_on_ranks(tmp_path: Path) -> None:
    """The Trainer: all rows in every update, on two ranks and in one process."""
    on_ranks(2, train_on_a_rank, tmp_path)
    expected, _ = train("trainer: after", tmp_path / "one", micro_batches=4)
    for rank in range(2):
        assert_same_moves(torch.load(tmp_path / f"{rank}.pt"), expected)
