"""What is measured on a CUDA device: ``run.py --suite gpu``. In the order of what is wanted most: time may run out.

Sizes: one mini-batch row, a packed batch, the longest response of the DAPO recipe; the heads of Qwen2.5-0.5B, of an 8B
model and of Qwen2.5-32B.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.configs import SUITES as CPU_SUITES
from benchmarks.configs import Config

N_TOKENS = (8192, 2048, 20480)
HEADS = ((4096, 151936), (896, 151936), (5120, 152064))
LIVE = (1.0, 0.5, 0.2)

_OURS = (
    "copy_",
    "mul_",
    "mul_, live rows",
    "three GEMMs",
    "three GEMMs, live tokens",
    "one GEMM",
    "dapo_kernels",
    "dapo_kernels, no wait",
)
_BACKENDS = ("dapo_kernels, triton", "dapo_kernels, cuda", "dapo_kernels, triton, a program a row")
_PEERS = (
    "dapo_kernels, new gradient",
    *_BACKENDS,
    "eager",
    "eager, softmax in fp32",
    "TRL selective_log_softmax",
    "TRL chunked log-probs",
    "Liger GRPO, Triton",
    "quack cross_entropy",
    "quack linear_cross_entropy",
    "cut-cross-entropy",
    "cut-cross-entropy, unfiltered",
    "verl linear_cross_entropy",
    "Liger scaled cross-entropy",
    "Megatron linear_cross_entropy",
    "flash-attn cross_entropy_loss",
)
# These compile for every shape, ten seconds and more each: in the first row of their kind only.
_COMPILED = ("torch.compile", "torch.compile, softmax in fp32", "Liger GRPO")

# One sequence: Liger's kernel from logits takes one advantage per sequence and one more row of logits.
_LOGITS = Config("logits", "bfloat16", 8192, 151936, device="cuda", min_rounds=7, seconds=1.5)
_HIDDEN = replace(_LOGITS, level="hidden", hidden=4096, n_sequences=4, min_rounds=5, seconds=3.0)


def _full(base: Config) -> Config:
    return replace(base, contestants=(*_OURS, *_PEERS, *_COMPILED), seconds=2 * base.seconds, headline=True)


def _with_peers(base: Config) -> Config:
    return replace(base, contestants=(*_OURS, *_PEERS))


def _brief(base: Config) -> Config:
    """The kernels and their denominators, beside a row that has the others."""
    return replace(base, contestants=_OURS, seconds=0.5 * base.seconds)


def _on_backends(base: Config) -> Config:
    """What decides between the backends, beside a row that has the others."""
    return replace(_brief(base), contestants=(*_OURS, *_BACKENDS))


def _sized(level: str, n_tokens: int, hidden: int, vocab: int, live: float = 1.0) -> Config:
    if level == "logits":
        return replace(_LOGITS, n_tokens=n_tokens, vocab=vocab, live=live)
    return replace(_HIDDEN, n_tokens=n_tokens, vocab=vocab, hidden=hidden, live=live)


def _rest(taken: tuple[Config, ...]) -> tuple[Config, ...]:
    """Every size, head and live share that is not there yet; at the logits level heads differ by vocabulary only."""
    names = {config.name for config in taken}
    rows: dict[str, Config] = {}
    for live in LIVE:
        for n_tokens in N_TOKENS:
            for hidden, vocab in HEADS:
                for level in ("logits", "hidden"):
                    row = _brief(_sized(level, n_tokens, hidden, vocab, live))
                    if row.name not in names:
                        rows[row.name] = row
    return tuple(rows.values())


_WANTED = (
    _full(_LOGITS),
    _full(_HIDDEN),
    *(_with_peers(_sized("hidden", 8192, *head)) for head in HEADS[1:]),
    *(_with_peers(_sized(level, n, *HEADS[0])) for n in N_TOKENS[1:] for level in ("logits", "hidden")),
    *(_brief(_sized(level, 8192, *HEADS[0], live=live)) for live in LIVE[1:] for level in ("logits", "hidden")),
    _with_peers(replace(_LOGITS, mode="forward")),
    _with_peers(replace(_HIDDEN, mode="forward")),
    _on_backends(replace(_LOGITS, dtype="float32")),
    _on_backends(replace(_LOGITS, vocab=32_000)),
    _brief(replace(_LOGITS, clipped=0.3)),
    _brief(replace(_HIDDEN, clipped=0.3)),
)
# Plain cross-entropy, which is REINFORCE with advantages of 1: what libraries without a policy loss are tuned for.
_CROSS_ENTROPY = replace(
    _HIDDEN,
    n_sequences=1,
    objective="reinforce",
    contestants=(
        *_OURS,
        "eager",
        "cut-cross-entropy",
        "quack linear_cross_entropy, chunked",
        "Liger fused linear cross-entropy",
    ),
)

GPU = (*_WANTED, _CROSS_ENTROPY, *_rest(_WANTED))
# The same on a small scale: does every contestant run at all, in half a minute.
GPU_SMOKE = (
    replace(_full(_LOGITS), n_tokens=256, vocab=2048, rounds=3, min_rounds=1),
    replace(_brief(_LOGITS), n_tokens=256, vocab=2048, live=0.5, rounds=3, min_rounds=1),
    replace(_with_peers(_HIDDEN), n_tokens=256, vocab=2048, hidden=256, rounds=3, min_rounds=1, headline=True),
    replace(_CROSS_ENTROPY, n_tokens=256, vocab=2048, hidden=256, rounds=3, min_rounds=1),
)

SUITES: dict[str, tuple[Config, ...]] = {**CPU_SUITES, "gpu": GPU, "gpu-smoke": GPU_SMOKE}
