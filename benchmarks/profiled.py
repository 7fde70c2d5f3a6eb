"""One call of each row kernel from logits, for a profiler: stage 7 of ``gpu.py``."""

from __future__ import annotations

import functools

from benchmarks.configs import REHEARSAL, Config
from benchmarks.contestants import ours, within
from benchmarks.problem import build
from dapo_kernels import use_backend
from dapo_kernels.backends import available_backends

CALLS = (  # dtype, V, mode, whether the gradient overwrites the logits
    ("bfloat16", 151936, "train", True),
    ("bfloat16", 151936, "train", False),
    ("bfloat16", 151936, "forward", False),
    ("bfloat16", 32000, "train", True),
    ("bfloat16", 50257, "train", True),
    ("float32", 151936, "train", True),
)

if __name__ == "__main__":
    for backend in (name for name in ("triton", "cuda") if available_backends()[name] is None):
        for dtype, vocab, mode, inplace in CALLS:
            n_tokens, vocab = (2, 160) if REHEARSAL else (4096, vocab)
            config = Config("logits", dtype, n_tokens, vocab, mode=mode, device="cuda")
            print(f"{backend}, {'in place' if inplace else 'not in place'}: {config.name}", flush=True)
            problem = build(config)
            problem.restore()
            within(problem, functools.partial(ours, inplace=inplace), functools.partial(use_backend, backend))()
