"""The table of what is measured. A new objective or shape is a new row here, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.allocators import ALLOCATORS, HUGE_PAGES, OUT_OF_THE_BOX


@dataclass(frozen=True)
class Config:
    """One workload; every contestant that can do it runs it side by side.

    Attributes:
        level: ``"logits"`` or ``"hidden"``: what the contestants start from.
        dtype: of logits, or of hidden states and head.
        n_tokens, vocab, hidden: sizes N, V, H (H is 0 at the logits level).
        n_sequences: equal sequences the tokens belong to; divides ``n_tokens``.
        mode: ``"train"``: loss and gradient of logits, or of hidden states and head; ``"forward"``: log-probs only.
        entropy: entropies too: forward, or for an objective that looks at them.
        live: share of the tokens that train; the others are masked.
        clipped: share of the live tokens whose ratio is clipped, so that their gradient is zero.
        kept: tokens of the vocabulary that each token was sampled from, its ``sampling_mask``; 0 is all.
        objective: a name in ``dapo_kernels.OBJECTIVES`` and in ``formulas.FORMULAS``.
        device: "cpu" or "cuda": where the tensors are.
        allocator: a name in ``allocators.ALLOCATORS``: of the process, where the tensors are on the CPU.
        lora: beside the plain head, the one with LoRA factors.
        isa: forces the instruction set of dapo_kernels and of eager PyTorch; ``None`` is the machine's best.
        contestants: names to run; ``None`` is every one that can.
        rounds: at most so many rounds; 1 leaves out the warm-up and checks the timed run itself.
        seconds: budget of the rounds, on a CPU those of each contestant (ours have twice that: their ratio to the
            denominator is read to the third digit), on a GPU those of all; at least ``min_rounds`` run all the same.
        headline: goes into the plot and the first tables.
    """

    level: str
    dtype: str
    n_tokens: int
    vocab: int
    hidden: int = 0
    n_sequences: int = 1
    mode: str = "train"
    entropy: bool = False
    live: float = 1.0
    clipped: float = 0.0
    kept: int = 0
    objective: str = "dapo"
    lora: bool = False
    device: str = "cpu"
    allocator: str = OUT_OF_THE_BOX
    isa: str | None = None
    contestants: tuple[str, ...] | None = None
    rounds: int = 31
    min_rounds: int = 5
    seconds: float = 20.0
    headline: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def logits_bytes(self) -> int:
        """Size of [N, V] in ``dtype``, whether or not somebody holds it."""
        return self.n_tokens * self.vocab * self.torch_dtype.itemsize

    @property
    def name(self) -> str:
        """The workload and, on a CPU, the allocator."""
        return f"{self.workload}, {self.allocator}" if self.device == "cpu" else self.workload

    @property
    def workload(self) -> str:
        parts = [self.level, self.dtype, f"N={self.n_tokens}", f"V={self.vocab}"]
        parts += [f"H={self.hidden}"] if self.hidden else []
        parts += [] if self.mode == "train" else ["forward+entropy" if self.entropy else "forward"]
        parts += [f"live={self.live:.0%}"] if self.live < 1 else []
        parts += [f"clipped={self.clipped:.0%}"] if self.clipped > 0 else []
        parts += [f"kept={self.kept}"] if self.kept else []
        parts += [self.objective] if self.objective != "dapo" else []
        parts += ["lora"] if self.lora else []
        parts += [self.isa] if self.isa else []
        return " ".join(parts)


# The contestants of the rows that look at how the cost of the kernels themselves moves.
_OURS = (
    "mul_",
    "mul_, live rows",
    "three GEMMs",
    "three GEMMs, live tokens",
    "one GEMM",
    "dapo_kernels",
)
# Rank 16; the head under them frozen, as LoRA has it, or not.
LORA_HEADS = ("dapo_kernels, LoRA", "dapo_kernels, LoRA and head")
_OURS_AND_EAGER = (*_OURS, "eager", "eager, softmax in fp32")
_PLAIN_PYTORCH = (
    *_OURS_AND_EAGER,
    "dapo_kernels, new gradient",
    "torch.compile",
    "torch.compile, softmax in fp32",
    "linear_cross_entropy",
    "linear_cross_entropy, chunked",
)

# The sweeps run in huge pages: where the bare pass is fastest, and a ratio to it hardest to keep.
_LOGITS = Config("logits", "bfloat16", 2048, 49152, n_sequences=4, allocator=HUGE_PAGES, seconds=1.0)
_HIDDEN = replace(_LOGITS, level="hidden", hidden=576, min_rounds=3, seconds=2.0)
# The head of Qwen2.5-0.5B: the widest vocabulary in use on the smallest hidden size.
_WIDE = replace(_HIDDEN, vocab=151936, hidden=896, min_rounds=2)

HEADLINE = (
    replace(_LOGITS, dtype="float32", headline=True),
    replace(_LOGITS, headline=True),
    replace(_HIDDEN, headline=True),
)


def in_each_allocator(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """The same rows under all three settings, one setting after the other: a process serves those that share it."""
    return tuple(replace(config, allocator=name) for name in ALLOCATORS for config in configs)


def _short(base: Config, **fields: Any) -> Config:
    """A row of a sweep: eager beside the kernels."""
    return replace(base, **{"seconds": 1.0, "contestants": _OURS_AND_EAGER, **fields})


def _brief(base: Config, **fields: Any) -> Config:
    """A row that is compared with the headline row of its dtype: the kernels and their denominators only."""
    return replace(base, **{"seconds": 1.0, "contestants": _OURS, **fields})


def _two_passes(base: Config) -> tuple[Config, ...]:
    """Objectives that take the statistics of all rows before the gradient of the first."""
    base = _brief(base)
    return replace(base, objective="gspo"), replace(base, objective="top_entropy", entropy=True)


# What a call costs that has next to nothing to do.
TINY = replace(
    _LOGITS,
    dtype="float32",
    n_tokens=64,
    vocab=64,
    n_sequences=1,
    rounds=1001,
    seconds=1.0,
    contestants=(*_OURS_AND_EAGER, "dapo_kernels, new gradient"),
)

# What bars and the README's sentences are about.
QUOTED = (
    TINY,
    _short(_LOGITS, n_tokens=1, n_sequences=1),
    _short(_LOGITS, dtype="float32", mode="forward"),
    _short(_HIDDEN, n_tokens=256, n_sequences=1),
    _brief(_HIDDEN, live=0.5),
    _brief(_HIDDEN, live=0.2),
    _brief(_HIDDEN, kept=64),
    _brief(_HIDDEN, kept=1000),
    _brief(_HIDDEN, dtype="float32", min_rounds=2),
    _brief(_HIDDEN, lora=True, contestants=(*_OURS, *LORA_HEADS)),
    _brief(_WIDE),
)
# How the cost moves with everything else. In the order of the inputs: rows that share them make them once.
SWEEP = (
    *(_short(_LOGITS, n_tokens=n, n_sequences=1) for n in (16, 256)),
    _brief(_LOGITS),
    _brief(_LOGITS, live=0.5, contestants=(*_OURS, "dapo_kernels, new gradient")),
    _brief(_LOGITS, live=0.2, contestants=(*_OURS, "dapo_kernels, new gradient")),
    _brief(_LOGITS, clipped=0.3),
    _brief(_LOGITS, kept=64),
    *_two_passes(_LOGITS),
    _short(_LOGITS, mode="forward", contestants=_PLAIN_PYTORCH),
    _brief(_LOGITS, mode="forward", entropy=True),
    _brief(_LOGITS, n_tokens=20480, min_rounds=3),
    _short(_LOGITS, dtype="float32", vocab=151936, min_rounds=3),
    _brief(_LOGITS, vocab=151936, min_rounds=3),
    _short(_HIDDEN, n_tokens=1, n_sequences=1),
    _brief(_HIDDEN, clipped=0.3),
    *_two_passes(_HIDDEN),
    _short(_HIDDEN, mode="forward", contestants=_PLAIN_PYTORCH),
    _brief(_HIDDEN, mode="forward", entropy=True),
)
# An older processor: the instruction set is the process's, too.
OLDER = (_brief(_LOGITS, dtype="float32", isa="avx2"), _brief(_LOGITS, isa="avx2"))
# The longest response of the DAPO recipe: its logits alone are 5.8 GiB in bfloat16. A minute and a half.
LONG = (replace(_WIDE, n_tokens=20480, n_sequences=1, rounds=1, min_rounds=1, contestants=_OURS),)

# One configuration of each kind, small enough for a test run and for pytest-benchmark.
SMOKE = (
    Config("logits", "float32", 64, 2048, n_sequences=2, rounds=3, headline=True),
    Config("logits", "bfloat16", 64, 2048, n_sequences=2, live=0.5, clipped=0.3, rounds=3),
    Config("logits", "bfloat16", 64, 2048, n_sequences=2, mode="forward", entropy=True, rounds=3),
    Config("hidden", "bfloat16", 64, 2048, hidden=64, n_sequences=2, rounds=3, headline=True),
    Config("hidden", "float32", 64, 2048, hidden=64, n_sequences=2, live=0.5, clipped=0.3, rounds=3, lora=True),
    Config("hidden", "bfloat16", 64, 2048, hidden=64, n_sequences=2, mode="forward", entropy=True, rounds=3),
    Config("logits", "float32", 64, 2048, isa="portable", contestants=_OURS, rounds=3),
    Config("logits", "float32", 64, 2048, n_sequences=2, rounds=3, headline=True, allocator=HUGE_PAGES),
)

SUITES: dict[str, tuple[Config, ...]] = {
    "smoke": SMOKE,
    "quick": tuple(replace(config, contestants=_PLAIN_PYTORCH) for config in HEADLINE),
    "headline": in_each_allocator(HEADLINE),
    "full": (*in_each_allocator(HEADLINE), *QUOTED),  # what `make bench` runs, in under ten minutes
    "sweep": (*SWEEP, *OLDER),  # three minutes more
    "long": LONG,
}
