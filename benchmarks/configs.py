"""The table of workloads: what ``run.py`` measures on a CPU and on a GPU. Add a row here to measure another shape."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from benchmarks.allocators import ALLOCATORS, HUGE_PAGES, OUT_OF_THE_BOX

# A rehearsal (``make gpu-rehearsal``) runs the GPU suites on CPU tensors of tiny sizes, with Triton's interpreter.
REHEARSAL = os.environ.get("BENCHMARK_REHEARSAL") == "1"


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
        clipped: share of the live tokens whose ratio is clipped, so that their gradient is zero.
        objective: a name in ``dapo_kernels.OBJECTIVES`` and in ``formulas.FORMULAS``.
        device: "cpu" or "cuda".
        allocator: a name in ``allocators.ALLOCATORS``, used on the CPU.
        contestants: names to run; ``None`` is every one that can.
        rounds: at most so many rounds; 1 skips the warm-up and checks the timed call itself.
        min_rounds, seconds: the rounds stop after ``seconds``, but not before ``min_rounds``. On a CPU this is the
            budget of each contestant (ours have twice that), on a GPU that of all contestants together.
        headline: goes into the first tables of the report.
        published: figures that others published of this shape: (what, figure, source). None of them is ours.
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
    objective: str = "dapo"
    device: str = "cpu"
    allocator: str = OUT_OF_THE_BOX
    contestants: tuple[str, ...] | None = None
    rounds: int = 31
    min_rounds: int = 5
    seconds: float = 20.0
    headline: bool = False
    published: tuple[tuple[str, str, str], ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_device(self) -> str:
        """Return where the tensors are: in a rehearsal those of a GPU suite are on the CPU."""
        return "cpu" if REHEARSAL else self.device

    @property
    def logits_bytes(self) -> int:
        """Return the size of [N, V] in ``dtype``."""
        return self.n_tokens * self.vocab * self.torch_dtype.itemsize

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
        parts += [f"clipped={self.clipped:.0%}"] if self.clipped > 0 else []
        parts += [self.objective] if self.objective != "dapo" else []
        return " ".join(parts)


# --- on a CPU ---------------------------------------------------------------------------------------------------------

_OURS = ("mul_", "mul_, live rows", "three GEMMs", "three GEMMs, live tokens", "one GEMM", "dapo_kernels")
_NEW_GRADIENT = "dapo_kernels, new gradient"
_EAGER = ("eager", "eager, softmax in fp32")
_COMPILED = ("torch.compile", "torch.compile, softmax in fp32")
_PLAIN_PYTORCH = (
    *(*_OURS, _NEW_GRADIENT, *_EAGER, *_COMPILED),
    *("linear_cross_entropy", "linear_cross_entropy, chunked"),
)

# The sweeps use huge pages: there the bare pass is fastest, and a low ratio to it is hardest to reach.
_LOGITS = Config("logits", "bfloat16", 2048, 49152, n_sequences=4, allocator=HUGE_PAGES, seconds=1.0)
_HIDDEN = replace(_LOGITS, level="hidden", hidden=576, min_rounds=3, seconds=2.0)
# The head of Qwen2.5-0.5B: the widest vocabulary in use on the smallest hidden size.
_WIDE = replace(_HIDDEN, vocab=151936, hidden=896, min_rounds=2)

HEADLINE = (
    replace(_LOGITS, dtype="float32", headline=True),
    replace(_LOGITS, headline=True),
    replace(_HIDDEN, headline=True),
)


def _in_each_allocator(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Return the same rows under every setting, grouped by setting, because one process serves one setting."""
    return tuple(replace(config, allocator=name) for name in ALLOCATORS for config in configs)


def _with_eager(base: Config, **fields: Any) -> Config:
    return replace(base, **{"seconds": 1.0, "contestants": (*_OURS, *_EAGER), **fields})


def _ours(base: Config, **fields: Any) -> Config:
    """Return a row with the kernels and their denominators only."""
    return replace(base, **{"seconds": 1.0, "contestants": _OURS, **fields})


# Rows that README and docs quote: the fixed cost of a call, other sizes, masked tokens.
QUOTED = (
    _with_eager(
        replace(_LOGITS, dtype="float32", n_tokens=64, vocab=64, n_sequences=1, rounds=1001),
        contestants=(*_OURS, *_EAGER, _NEW_GRADIENT),
    ),
    _with_eager(_LOGITS, n_tokens=1, n_sequences=1),
    _with_eager(_LOGITS, dtype="float32", mode="forward"),
    _with_eager(_HIDDEN, n_tokens=256, n_sequences=1),
    *(_ours(_HIDDEN, live=live) for live in (0.5, 0.2)),
    _ours(_HIDDEN, dtype="float32", min_rounds=2),
    _ours(_WIDE),
)
# Rows with the same inputs stand together: the inputs are made once.
SWEEP = (
    *(_with_eager(_LOGITS, n_tokens=n, n_sequences=1) for n in (16, 256)),
    *(_ours(_LOGITS, live=live, contestants=(*_OURS, _NEW_GRADIENT)) for live in (1.0, 0.5, 0.2)),
    _ours(_LOGITS, clipped=0.3),
    _with_eager(_LOGITS, mode="forward", contestants=_PLAIN_PYTORCH),
    _ours(_LOGITS, n_tokens=20480, min_rounds=3),
    _with_eager(_LOGITS, dtype="float32", vocab=151936, min_rounds=3),
    _ours(_LOGITS, vocab=151936, min_rounds=3),
    _with_eager(_HIDDEN, mode="forward", contestants=_PLAIN_PYTORCH),
    _ours(_HIDDEN, objective="entropy_bonus", entropy=True),
)
# The longest response of the DAPO recipe: its logits alone are 5.8 GiB in bfloat16.
LONG = (_ours(_WIDE, n_tokens=20480, n_sequences=1, rounds=1, min_rounds=1, seconds=_WIDE.seconds),)

_SMALL = Config("logits", "float32", 64, 2048, n_sequences=2, rounds=3)
_SMALL_16 = replace(_SMALL, dtype="bfloat16")
SMOKE = (
    replace(_SMALL, headline=True),
    replace(_SMALL_16, live=0.5, clipped=0.3),
    replace(_SMALL_16, mode="forward", entropy=True),
    replace(_SMALL_16, level="hidden", hidden=64, headline=True),
    replace(_SMALL, level="hidden", hidden=64, live=0.5, clipped=0.3),
    replace(_SMALL_16, level="hidden", hidden=64, mode="forward", entropy=True),
    replace(_SMALL, headline=True, allocator=HUGE_PAGES),
)

# --- on a GPU ---------------------------------------------------------------------------------------------------------

_CUDA_OURS = ("copy_", *_OURS, "dapo_kernels, no wait")
BACKENDS = ("dapo_kernels, triton", "dapo_kernels, cuda")
NEW_GRADIENTS = tuple(f"{name}, new gradient" for name in BACKENDS)
# Of the cuda backend, which chooses one of them: a row held by a cluster of blocks, or swept twice by one block.
PATHS = ("dapo_kernels, cuda cluster", "dapo_kernels, cuda sweep")
_CUDA_PEERS = (
    *(
        _NEW_GRADIENT,
        *BACKENDS,
        *PATHS,
        *_EAGER,
        "TRL selective_log_softmax",
        "TRL chunked log-probs",
        "Liger GRPO, Triton",
    ),
    *("quack cross_entropy", "quack linear_cross_entropy", "cut-cross-entropy", "cut-cross-entropy, unfiltered"),
    *("verl linear_cross_entropy", "Liger scaled cross-entropy", "linear_cross_entropy, chunked"),
)
# Plain cross-entropy is REINFORCE with advantages of 1: what libraries without a policy loss are tuned for.
_CROSS_ENTROPY_PEERS = (
    *("eager", "cut-cross-entropy", "quack linear_cross_entropy, chunked", "Liger fused linear cross-entropy"),
)
# One sequence: Liger's kernel from logits takes one advantage for each sequence and one more row of logits.
_CUDA_LOGITS = Config("logits", "bfloat16", 8192, 151936, device="cuda", min_rounds=7, seconds=1.5)
_CUDA_HIDDEN = replace(_CUDA_LOGITS, level="hidden", hidden=4096, n_sequences=4, min_rounds=5, seconds=3.0)


def _with_peers(base: Config, **fields: Any) -> Config:
    return replace(base, contestants=(*_CUDA_OURS, *_CUDA_PEERS), **fields)


def _with_compiled(base: Config) -> Config:
    """Return a row with torch.compile too, which takes ten seconds and more for every shape."""
    everyone = (*_CUDA_OURS, *_CUDA_PEERS, *_COMPILED, "Liger GRPO")
    return replace(base, contestants=everyone, seconds=2 * base.seconds)


def _on_backends(base: Config, **fields: Any) -> Config:
    return replace(base, contestants=(*_CUDA_OURS, *BACKENDS, *PATHS), seconds=0.5 * base.seconds, **fields)


def _cross_entropy(sizes: tuple[int, int, int], *published: tuple[str, str, str]) -> Config:
    n_tokens, hidden, vocab = sizes
    base = replace(_CUDA_HIDDEN, n_tokens=n_tokens, hidden=hidden, vocab=vocab, n_sequences=1, published=published)
    return replace(base, objective="reinforce", contestants=(*_CUDA_OURS, *_CROSS_ENTROPY_PEERS))


# Bandwidth of a copy and rates of matrix products: the denominators of everything else on this card.
GPU_CARD = (
    *(_on_backends(_CUDA_LOGITS, n_tokens=n) for n in (2048, 8192)),
    _on_backends(_CUDA_LOGITS, dtype="float32"),
    *(_on_backends(_CUDA_HIDDEN, hidden=hidden) for hidden in (896, 4096)),
)
# V: Llama 2, GPT-2, Llama 3, Qwen2.5, Gemma, and an odd one, whose rows start between 16-byte boundaries.
VOCABULARIES = (151936, 32000, 50257, 128256, 262144, 262143)
GPU_LOGITS = (
    _with_compiled(_CUDA_LOGITS),
    *(_with_peers(_CUDA_LOGITS, vocab=vocab) for vocab in VOCABULARIES[1:]),
    _with_peers(_CUDA_LOGITS, dtype="float32"),
    *(_on_backends(_CUDA_LOGITS, vocab=vocab, dtype="float32") for vocab in VOCABULARIES[1:]),
    *(_with_peers(_CUDA_LOGITS, n_tokens=n) for n in (4096, 65536)),
    *(_on_backends(_CUDA_LOGITS, vocab=32000, n_tokens=n) for n in (4096, 65536)),
    # 65536 tokens of the widest vocabulary, twice, take more than 80 GB: there the narrow one alone has figures.
    *(_on_backends(_CUDA_LOGITS, dtype="float32", n_tokens=n) for n in (4096, 16384, 65536)),
    _on_backends(_CUDA_LOGITS, dtype="float32", vocab=32000, n_tokens=65536),
    _with_peers(_CUDA_LOGITS, mode="forward"),
    *(_on_backends(_CUDA_LOGITS, live=live) for live in (0.5, 0.2)),
    _on_backends(_CUDA_LOGITS, clipped=0.3),
)
# With the figures that others published of the same shape.
_PUBLISHED_SHAPES = (
    _with_peers(
        _CUDA_LOGITS,
        mode="forward",
        entropy=True,
        published=(("log-probs and entropies, H100", "0.89 ms (2.8 TB/s); 12.8 ms before", "TRL #7244"),),
    ),
    _cross_entropy(
        (8192, 4096, 151936),
        ("three GEMMs, H100", "42 ms", "TRL #7244"),
        ("eager, H100", "59 ms, 19.9 GiB", "TRL #7244"),
        ("Liger fused linear cross-entropy, H100", "192 ms, 6.1 GiB", "TRL #7244"),
    ),
    _cross_entropy((4096, 4096, 128256), ("fused, H200", "18.34 ms (704 TFLOP/s as 6MHV)", "Liger #1369")),
    _with_peers(
        _CUDA_HIDDEN,
        vocab=131072,
        entropy=True,
        objective="entropy_bonus",
        published=(
            ("linear + entropy, H100", "forward 12.3 ms, backward 37.9 ms, both 50.2 ms", "Liger 0.8.5 metadata"),
            ("the same, cuTile, B200", "11.36 ms, 2.64 GiB", "Liger 0.8.5 metadata"),
        ),
    ),
    _with_peers(
        _CUDA_HIDDEN,
        vocab=262144,
        published=(("scaled, H200, N and H not given", "forward 791, backward 783 TFLOP/s", "Liger #1422"),),
    ),
)
GPU_HIDDEN = (
    _with_compiled(_CUDA_HIDDEN),
    *_PUBLISHED_SHAPES,
    _with_peers(_CUDA_HIDDEN, vocab=131072, mode="forward", entropy=True),
    _with_peers(_CUDA_HIDDEN, mode="forward"),
    *(_with_peers(_CUDA_HIDDEN, hidden=hidden, vocab=vocab) for hidden, vocab in ((896, 151936), (5120, 152064))),
    *(_on_backends(_CUDA_HIDDEN, live=live) for live in (0.5, 0.2)),
    _on_backends(_CUDA_HIDDEN, clipped=0.3),
    _with_peers(_CUDA_HIDDEN, n_tokens=20480),
)


class Tuning(NamedTuple):
    """Launch parameters of the Triton loss that ``tuning.py`` tries in place of the built-in ones.

    Attributes:
        warps: how many share a row.
        loads: 16-byte accesses of a thread on their way at once.
        filled: share of an SM's 64 warps that ``rows_per_sm`` counts with.
        limited: let the L2 cache limit the rows in flight (``residency.programs``).
        hints: the second read of a row and its write are ``evict_first``.
        apart: a kernel for the statistics and one for the gradient, as without ``inplace_backward``.
    """

    warps: int
    loads: int = 2
    filled: float = 1.0
    limited: bool = True
    hints: bool = True
    apart: bool = False

    @property
    def name(self) -> str:
        rows = f"{max(1, round(64 * self.filled) // self.warps)} rows an SM" if self.limited else "a program a row"
        rows = "two kernels" if self.apart else rows
        return f"triton: {self.warps} warps, {self.loads} loads, {rows}{'' if self.hints else ', no eviction hints'}"


TUNINGS = (
    *(Tuning(warps, loads) for warps in (4, 8, 16, 32) for loads in (1, 2, 4)),
    *(Tuning(warps, filled=0.5) for warps in (8, 16)),
    *(Tuning(warps, limited=False) for warps in (4, 8, 16, 32)),
    *(Tuning(warps, hints=False) for warps in (4, 16, 32)),
    *(Tuning(warps, hints=hints, apart=True) for warps in (8, 32) for hints in (True, False)),
)
_COMPARED = ("copy_", *BACKENDS, *NEW_GRADIENTS)
_TUNING_SHAPES = {(32000, "bfloat16"), (151936, "bfloat16"), (50257, "bfloat16"), (151936, "float32")}


def _tuned(vocab: int, dtype: str, mode: str = "train") -> Config:
    config = replace(_CUDA_LOGITS, vocab=vocab, dtype=dtype, mode=mode, contestants=_COMPARED, seconds=0.75)
    if mode != "train" or (vocab, dtype) not in _TUNING_SHAPES:
        return config
    tried = (tuning.name for tuning in TUNINGS if vocab % 8 == 0 or tuning.loads == 2)  # odd rows: no 16-byte accesses
    return replace(config, contestants=(*_COMPARED, *PATHS, *tried), seconds=4.0)


_DTYPES = ("bfloat16", "float32")
GPU_TUNING = (
    *(_tuned(vocab, dtype) for dtype in _DTYPES for vocab in VOCABULARIES),
    *(_tuned(vocab, dtype, "forward") for dtype in _DTYPES for vocab in VOCABULARIES),
)


def _small(configs: Iterable[Config]) -> tuple[Config, ...]:
    """Return the same rows in the sizes of a rehearsal, without those that are equal then and without compilers."""
    rows: dict[str, Config] = {}
    for config in configs:
        names = tuple(name for name in config.contestants or () if name not in (*_COMPILED, "Liger GRPO"))
        few = 16 if config.live == 1 else 64  # the loss of fewer live tokens rounds by more than the check allows
        sizes = {
            "n_tokens": few if config.hidden else 8,
            "vocab": 160 + config.vocab % 2,
            "hidden": min(config.hidden, 128),
        }
        row = replace(config, **sizes, contestants=names, rounds=2, min_rounds=1, seconds=0.1)
        rows.setdefault(row.name, row)
    return tuple(rows.values())


SUITES: dict[str, tuple[Config, ...]] = {
    "smoke": SMOKE,
    "quick": tuple(replace(config, contestants=_PLAIN_PYTORCH) for config in HEADLINE),
    "headline": _in_each_allocator(HEADLINE),
    "full": (*_in_each_allocator(HEADLINE), *QUOTED),  # what `make bench` runs
    "sweep": SWEEP,
    "long": LONG,
}
_GPU_SUITES = {"gpu-card": GPU_CARD, "gpu-logits": GPU_LOGITS, "gpu-hidden": GPU_HIDDEN, "gpu-tuning": GPU_TUNING}
SUITES |= {name: _small(configs) if REHEARSAL else configs for name, configs in _GPU_SUITES.items()}
