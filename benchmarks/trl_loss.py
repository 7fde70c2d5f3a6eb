"""The loss part of a GRPO step, TRL's trainer against ours: ``python -m benchmarks.trl_loss``.

Both trainers are real, both run ``compute_loss`` and the backward pass of one micro-batch. The model is a Llama without
layers: hidden states are normalised embeddings of random tokens, at no cost worth the name, and the output head has the
size of SmolLM2-135M's (V = 49152, H = 576, bfloat16, a weight of its own). So the time is that of log-probs, entropies,
loss, metrics and gradients of hidden states and head.

Every case runs under each setting of ``allocators.py``, in a process of its own; TRL is quoted where it is fastest,
ours under the same. Memory is measured in a process of its own per trainer: the resident high-water mark of a second
call minus what was resident before it, gradients included.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import allocators, machine
from benchmarks.allocators import ALLOCATORS

ROOT = Path(__file__).resolve().parent.parent
VOCAB, HIDDEN, PROMPT = 49152, 576, 8
BATCH, WIDTH = 16, 128  # completions of a micro-batch, tokens of the longest
TRAINERS = ("TRL", "dapo_kernels")
CASES: dict[str, dict[str, Any]] = {
    "dapo, all tokens live": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo, half of them padding": {"loss_type": "dapo", "epsilon_high": 0.28, "live": 0.5},
    "grpo with KL, all tokens live": {"loss_type": "grpo", "beta": 0.04},
    "gspo, all tokens live": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


def make_trainer(name: str, case: str) -> Any:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from dapo_kernels.integrations.trl import DapoGRPOTrainer
    from dapo_runner.run.tiny_model import make_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 0, "num_attention_heads": 9}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).to(torch.bfloat16)
    network.get_input_embeddings().weight.requires_grad_(False)
    torch.nn.init.normal_(network.lm_head.weight, std=HIDDEN**-0.5)
    options = {key: value for key, value in CASES[case].items() if key != "live"}
    folder = tempfile.mkdtemp()
    network.save_pretrained(folder)  # the reference model is loaded from here
    args = GRPOConfig(
        output_dir=folder,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=BATCH,
        per_device_train_batch_size=BATCH,
        report_to="none",
        use_cpu=True,
        **options,
    )
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    network.get_input_embeddings().weight.requires_grad_(False)
    trainer = {"TRL": GRPOTrainer, "dapo_kernels": DapoGRPOTrainer}[name](
        model=network,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1"]}),
        processing_class=make_tokenizer(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def make_inputs(trainer: Any, case: str) -> dict[str, Any]:
    """One micro-batch as TRL prepares it, with old log-probs near the policy's own."""
    rng = torch.Generator().manual_seed(1)
    live = CASES[case].get("live", 1.0)
    lengths = [WIDTH if live == 1.0 else random.Random(i).randint(2, round(2 * live * WIDTH) - 2) for i in range(BATCH)]
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    inputs = {
        "prompt_ids": torch.randint(0, VOCAB, (BATCH, PROMPT), generator=rng),
        "prompt_mask": torch.ones(BATCH, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(0, VOCAB, (BATCH, WIDTH), generator=rng),
        "completion_mask": mask,
        "advantages": torch.randn(BATCH, generator=rng),
        "num_items_in_batch": mask.sum(),
    }
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
    with torch.no_grad():
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, WIDTH)
    noise = 0.02 * torch.randn(BATCH, WIDTH, generator=rng)
    inputs["old_per_token_logps"] = logprobs + noise * mask
    if trainer.beta != 0:
        inputs["ref_per_token_logps"] = logprobs - 2 * noise * mask
    return inputs


def step_of(trainer: Any, inputs: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    """One micro-batch: the loss and the head's gradient."""
    head = trainer.model.lm_head.weight

    def step() -> tuple[Tensor, Tensor]:
        trainer.model.zero_grad(set_to_none=True)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.detach(), head.grad

    return step


def bare_gemms(n_tokens: int) -> Callable[[], None]:
    """Logits, gradient of the hidden states, gradient of the head, into memory that is there."""
    hidden, weight = (torch.randn(n, HIDDEN).to(torch.bfloat16) for n in (n_tokens, VOCAB))
    logits = hidden.new_empty(n_tokens, VOCAB)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return run


def peak_extra(name: str, case: str) -> int:
    """Bytes beyond model and inputs during a second call."""
    from dapo_kernels.memory import release_workspace

    trainer = make_trainer(name, case)
    step = step_of(trainer, make_inputs(trainer, case))
    step()
    trainer.model.zero_grad(set_to_none=True)
    release_workspace()  # what is kept for the next call counts too
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    machine.reset_peak()
    before = machine.resident_bytes()
    step()
    return machine.peak_resident_bytes() - before


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Check that the two agree, then interleaved rounds."""
    trainers = {name: make_trainer(name, case) for name in TRAINERS}
    inputs = make_inputs(trainers["TRL"], case)
    steps = {name: step_of(trainer, inputs) for name, trainer in trainers.items()}
    results = {name: step() for name, step in steps.items()}
    (loss, gradient), (other_loss, other_gradient) = (results[name] for name in TRAINERS)
    apart = float((gradient.double() - other_gradient.double()).norm() / gradient.double().norm())
    # Both round logits and their gradient to bfloat16 (2⁻⁹).
    if abs(float(loss - other_loss)) > 1e-3 or apart > 1e-2:
        raise RuntimeError(
            f"{case}: the trainers disagree: losses {loss}, {other_loss}; gradients apart by {apart:.1e}"
        )
    contestants = {**steps, "three GEMMs": bare_gemms(int(inputs["completion_mask"].sum()))}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - began))
    rows = {name: {"median_ms": statistics.median(ms), "times_ms": ms} for name, ms in times.items()}
    for name in TRAINERS:
        rows[name]["peak_extra_bytes"] = _in_a_process(name, case, torch.get_num_threads())
    route = trainers["dapo_kernels"].loss_route
    return {"case": case, "tokens": int(inputs["completion_mask"].sum()), "route": route, "apart": apart, "rows": rows}


def _in_a_process(name: str, case: str, threads: int) -> int:
    command = [sys.executable, "-m", "benchmarks.trl_loss", "--threads", str(threads), "--memory", name, case]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout.split()[-1])


def measured_under(allocator: str, case: str, rounds: int, threads: int) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trl_loss", "--threads", str(threads), "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, "--case", case],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=allocators.environment(allocator),
    )
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record | {"allocator": allocator}


def trl_is_best(record: dict[str, Any], records: list[dict[str, Any]]) -> bool:
    """Is this the allocator under which TRL is fastest in this case?"""
    times = [one["rows"]["TRL"]["median_ms"] for one in records if one["case"] == record["case"]]
    return bool(record["rows"]["TRL"]["median_ms"] == min(times))


def markdown(results: dict[str, Any]) -> str:
    here = results["machine"]
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("torch", "transformers", "trl"))
    lines = [
        "# The loss part of a GRPO step, TRL's trainer and ours",
        "",
        f"- machine: {here['cpu']}, {here['cores']} cores; threads: {results['threads']}; "
        f"load average {here['load_average'][0]} at the start",
        f"- versions: {versions}; commit {here['commit']}",
        f"- command: `{results['command']}`, started {results['started']}",
        "",
        f"`compute_loss` and its backward pass, {BATCH} completions of at most {WIDTH} tokens, H = {HIDDEN}, "
        f"V = {VOCAB}, bfloat16, behind a model without layers. Medians of {results['rounds']} interleaved rounds. "
        "Peak extra MiB: the resident high-water mark of one call alone in a process, gradients included. Before "
        "that the two were compared: loss and gradient of the head. In bold: the allocator under which TRL is fastest.",
        "",
        *(f"- {name}: {allocators.spelled(name)}" for name in ALLOCATORS),
        "",
        "| case | allocator | live tokens | TRL ms | ours ms | TRL ÷ ours | three GEMMs ms | TRL MiB | ours MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in results["records"]:
        theirs, ours, floor = (record["rows"][name] for name in (*TRAINERS, "three GEMMs"))
        cells = [
            f"{record['case']} (`{record['route']}`)",
            f"**{record['allocator']}**" if trl_is_best(record, results["records"]) else record["allocator"],
            f"{record['tokens']}",
            *(f"{row['median_ms']:.0f}" for row in (theirs, ours)),
            f"{theirs['median_ms'] / ours['median_ms']:.2f}×",
            f"{floor['median_ms']:.0f}",
            *(f"{row['peak_extra_bytes'] / 2**20:.0f}" for row in (theirs, ours)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--memory", nargs=2, metavar=("TRAINER", "CASE"), help="only one trainer's peak extra bytes")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    if args.memory:
        print(peak_extra(*args.memory))
        return
    if args.case:
        print(json.dumps(measure(args.case, args.rounds)))
        return
    started = datetime.now(timezone.utc)
    here = machine.describe()
    results: dict[str, Any] = {
        "machine": here,
        "threads": args.threads,
        "rounds": args.rounds,
        "started": started.isoformat(timespec="seconds"),
        "command": machine.command("python", "-m", "benchmarks.trl_loss"),
        "records": [],
    }
    base = args.out / f"trl-loss-{machine.slug(here)}-{started:%Y%m%d-%H%M}"
    for case in (case for case in CASES if args.only in case):
        for allocator in ALLOCATORS:
            results["records"].append(measured_under(allocator, case, args.rounds, args.threads))
            base.with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False))
            base.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
