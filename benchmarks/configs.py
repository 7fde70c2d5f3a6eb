"""The table of workloads: what ``run.py`` measures on a CPU and on a GPU. Add a row here to measure another shape."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from benchmarks.allocators import ALLOCATORS, HUGE_PAGES, OUT_OF_THE_BOX

# A rehearsal (``make gpu-rehearsal``) runs the GPU suites on CPU tensors of tiny sizes, with Triton's interpreter.
REHEARSAL = os.environ.get("BENCHMARK_REHEARSAL") == "1"
# Kinds of contestants.
OURS = ("ours", "backend", "launch")
COMPARED = ("denominator", "ours", "backend")
WITH_EAGER = (*COMPARED, "eager")
WITH_PEERS = (*WITH_EAGER, "peer")
EVERYONE = (*WITH_PEERS, "compile")


@dataclass(frozen=True)
class Config:
    """One workload. Every contestant that can do it is measured on it.

    Attributes:
        level: ``"logits"`` or ``"hidden"``: what the contestants start from.
        dtype: of logits, or of hidden states and head.
        n_tokens, vocab, hidden: sizes N, V, H (H is 0 at the logits level).
        n_sequences: number of sequences of equal length; must divide ``n_tokens``.
        mode: ``"train"``: loss and gradients; ``"forward"``: log-probs only.
        entropy: also compute entropies. In "train" mode the objective has to use them.
        live: share of the tokens that train; the others are masked.
        objective: a name in ``dapo_kernels.OBJECTIVES`` and in ``formulas.FORMULAS``.
        device: "cpu" or "cuda".
        allocator: a name in ``allocators.ALLOCATORS``, used on the CPU.
        kinds: ``Contestant.kind`` of those to measure.
        rounds: at most so many rounds.
        min_rounds, seconds: the rounds of a contestant stop after ``seconds``, but not before ``min_rounds``.
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
    objective: str = "dapo"
    device: str = "cpu"
    allocator: str = OUT_OF_THE_BOX
    kinds: tuple[str, ...] = EVERYONE
    rounds: int = 31
    min_rounds: int = 5
    seconds: float = 1.0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_device(self) -> str:
        """Return where the tensors are: in a rehearsal those of a GPU suite are on the CPU."""
        return "cpu" if REHEARSAL else self.device

    @property
    def name(self) -> str:
        """Return the workload and, on a CPU, the allocator."""
        return f"{self.workload}, {self.allocator}" if self.device == "cpu" else self.workload

    @property
    def workload(self) -> str:
        parts = [self.level, self.dtype, f"N={self.n_tokens}", f"V={self.vocab}"]
        parts += [f"H={self.hidden}"] if self.hidden else []
        parts += [] if self.mode == "train" else ["forward+entropy" if self.entropy else "forward"]
        parts += [f"live={self.live:.0%}"] if self.live < 1 else []
        parts += [self.objective] if self.objective != "dapo" else []
        return " ".join(parts)


# --- on a CPU ---------------------------------------------------------------------------------------------------------

# The sweeps use huge pages: there the bare pass is fastest, and a low ratio to it is hardest to reach.
_LOGITS = Config("logits", "bfloat16", 2048, 49152, n_sequences=4, allocator=HUGE_PAGES)
_HIDDEN = replace(_LOGITS, level="hidden", hidden=576, min_rounds=3)
# The head of Qwen2.5-0.5B: the widest vocabulary in use on the smallest hidden size.
_WIDE = replace(_HIDDEN, vocab=151936, hidden=896, min_rounds=2, kinds=COMPARED)
_OURS, _OURS_HIDDEN = replace(_LOGITS, kinds=COMPARED), replace(_HIDDEN, kinds=COMPARED)
_EAGER, _EAGER_HIDDEN = replace(_LOGITS, kinds=WITH_EAGER), replace(_HIDDEN, kinds=WITH_EAGER)

# Grouped by setting, because one process serves one setting.
HEADLINE = tuple(
    replace(config, allocator=name)
    for name in ALLOCATORS
    for config in (replace(_LOGITS, dtype="float32"), _LOGITS, replace(_HIDDEN, seconds=2.0))
)
# Rows that README and docs quote: the fixed cost of a call, other sizes, masked tokens.
QUOTED = (
    replace(_EAGER, dtype="float32", n_tokens=64, vocab=64, n_sequences=1, rounds=1001),
    replace(_EAGER, n_tokens=1, n_sequences=1),
    replace(_EAGER, dtype="float32", mode="forward"),
    replace(_EAGER_HIDDEN, n_tokens=256, n_sequences=1),
    *(replace(_OURS_HIDDEN, live=live) for live in (0.5, 0.2)),
    replace(_OURS_HIDDEN, dtype="float32", min_rounds=2),
    _WIDE,
)
# Rows with the same inputs stand together: the inputs are made once.
SWEEP = (
    *(replace(_EAGER, n_tokens=n, n_sequences=1) for n in (16, 256)),
    *(replace(_OURS, live=live) for live in (1.0, 0.5, 0.2)),
    replace(_LOGITS, mode="forward", kinds=(*WITH_EAGER, "compile")),
    replace(_OURS, n_tokens=20480, min_rounds=3),
    replace(_EAGER, dtype="float32", vocab=151936, min_rounds=3),
    replace(_OURS, vocab=151936, min_rounds=3),
    replace(_HIDDEN, mode="forward", kinds=(*WITH_EAGER, "compile")),
    replace(_OURS_HIDDEN, objective="entropy_bonus", entropy=True),
)
# The longest response of the DAPO recipe: its logits alone are 5.8 GiB in bfloat16.
LONG = (replace(_WIDE, n_tokens=20480, n_sequences=1, rounds=1, min_rounds=1),)

_SMALL = Config("logits", "float32", 64, 2048, n_sequences=2, rounds=3)
_SMALL_16 = replace(_SMALL, dtype="bfloat16")
SMOKE = (
    _SMALL,
    replace(_SMALL_16, live=0.5),
    replace(_SMALL_16, mode="forward", entropy=True),
    replace(_SMALL_16, level="hidden", hidden=64),
    replace(_SMALL, level="hidden", hidden=64, live=0.5),
    replace(_SMALL_16, level="hidden", hidden=64, mode="forward", entropy=True),
)

# --- on a GPU ---------------------------------------------------------------------------------------------------------

# One sequence: Liger's kernel from logits takes one advantage for each sequence and one more row of logits. In one row
# of each suite torch.compile, which takes ten seconds and more for every shape.
_CUDA_LOGITS = Config("logits", "bfloat16", 8192, 151936, device="cuda", kinds=WITH_PEERS, min_rounds=7, seconds=0.15)
_CUDA_HIDDEN = replace(_CUDA_LOGITS, level="hidden", hidden=4096, n_sequences=4, min_rounds=5, seconds=0.3)
_ON_BACKENDS, _HIDDEN_ON_BACKENDS = replace(_CUDA_LOGITS, kinds=COMPARED), replace(_CUDA_HIDDEN, kinds=COMPARED)
# Plain cross-entropy is REINFORCE with advantages of 1: what libraries without a policy loss are tuned for.
_CROSS_ENTROPY = replace(_CUDA_HIDDEN, n_sequences=1, objective="reinforce")

# V: Llama 2, GPT-2, Llama 3, Qwen2.5, Gemma, and an odd one, whose rows start between 16-byte boundaries.
VOCABULARIES = (151936, 32000, 50257, 128256, 262144, 262143)
GPU_LOGITS = (
    replace(_CUDA_LOGITS, kinds=EVERYONE),
    *(replace(_CUDA_LOGITS, vocab=vocab) for vocab in VOCABULARIES[1:]),
    replace(_CUDA_LOGITS, dtype="float32"),
    *(replace(_ON_BACKENDS, vocab=vocab, dtype="float32") for vocab in VOCABULARIES[1:]),
    *(replace(_CUDA_LOGITS, n_tokens=n) for n in (4096, 65536)),
    *(replace(_ON_BACKENDS, vocab=32000, n_tokens=n) for n in (4096, 65536)),
    # 65536 tokens of the widest vocabulary, twice, take more than 80 GB: there the narrow one alone has figures.
    *(replace(_ON_BACKENDS, dtype="float32", n_tokens=n) for n in (4096, 16384, 65536)),
    replace(_ON_BACKENDS, dtype="float32", vocab=32000, n_tokens=65536),
    replace(_CUDA_LOGITS, mode="forward"),
    *(replace(_ON_BACKENDS, live=live) for live in (0.5, 0.2)),
)
# Shapes of which others published figures: docs/gpu.md.
_PUBLISHED_SHAPES = (
    replace(_CUDA_LOGITS, mode="forward", entropy=True),
    _CROSS_ENTROPY,
    replace(_CROSS_ENTROPY, n_tokens=4096, vocab=128256),
    replace(_CUDA_HIDDEN, vocab=131072, entropy=True, objective="entropy_bonus"),
    replace(_CUDA_HIDDEN, vocab=262144),
)
GPU_HIDDEN = (
    replace(_CUDA_HIDDEN, kinds=EVERYONE),
    *_PUBLISHED_SHAPES,
    replace(_CUDA_HIDDEN, vocab=131072, mode="forward", entropy=True),
    replace(_CUDA_HIDDEN, mode="forward"),
    *(replace(_CUDA_HIDDEN, hidden=hidden, vocab=vocab) for hidden, vocab in ((896, 151936), (5120, 152064))),
    *(replace(_HIDDEN_ON_BACKENDS, live=live) for live in (0.5, 0.2)),
    replace(_CUDA_HIDDEN, n_tokens=20480),
)
_TUNED = {(32000, "bfloat16"), (151936, "bfloat16"), (50257, "bfloat16"), (151936, "float32")}


def _on_each_backend(vocab: int, dtype: str, mode: str) -> Config:
    """Return a kind of call from logits; with other launches of the Triton loss for long, short and odd rows."""
    launches = ("launch",) if mode == "train" and (vocab, dtype) in _TUNED else ()
    return replace(_CUDA_LOGITS, vocab=vocab, dtype=dtype, mode=mode, kinds=("denominator", "backend", *launches))


GPU_TUNING = tuple(
    _on_each_backend(vocab, dtype, mode)
    for mode in ("train", "forward")
    for dtype in ("bfloat16", "float32")
    for vocab in VOCABULARIES
)


def _small(configs: Iterable[Config]) -> tuple[Config, ...]:
    """Return the same rows in the sizes of a rehearsal, without those that are equal then and without compilers."""
    rows: dict[str, Config] = {}
    for config in configs:
        few = 16 if config.live == 1 else 64  # the loss of fewer live tokens rounds by more than the check allows
        row = replace(
            config,
            n_tokens=few if config.hidden else 2,
            vocab=160 + config.vocab % 2,
            hidden=min(config.hidden, 128),
            kinds=tuple(kind for kind in config.kinds if kind != "compile"),
            rounds=1,
            min_rounds=1,
        )
        rows.setdefault(row.name, row)
    return tuple(rows.values())


SUITES: dict[str, tuple[Config, ...]] = {
    "smoke": SMOKE,
    "full": (*HEADLINE, *QUOTED),  # what `make bench` runs
    "sweep": SWEEP,
    "long": LONG,
}
_GPU_SUITES = {"gpu-logits": GPU_LOGITS, "gpu-hidden": GPU_HIDDEN, "gpu-tuning": GPU_TUNING}
SUITES |= {name: _small(configs) if REHEARSAL else configs for name, configs in _GPU_SUITES.items()}
