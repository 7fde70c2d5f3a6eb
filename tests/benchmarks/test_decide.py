"""What a results file of a GPU says about the defaults, on made-up ones."""

from __future__ import annotations

from typing import Any

from benchmarks import decide
from benchmarks.gpu_configs import GPU
from dapo_kernels.backends.registry import Default


def record(
    vocab: int,
    cuda: float | None,
    dtype: str = "bfloat16",
    level: str = "logits",
    **more: Any,
) -> dict[str, Any]:
    times = {decide.TRITON: 1.0, decide.CUDA: cuda, decide.UNLIMITED: 1.25}
    rows = [{"name": n, "status": "ok" if t else "failed", "median_ms": t} for n, t in times.items()]
    return {"fields": {"mode": "train", "level": level, "dtype": dtype, "vocab": vocab} | more, "rows": rows}


def test_cuda_takes_what_it_is_ahead_in() -> None:
    big, small = record(151_936, 0.8), record(32_000, 0.9)
    assert decide.decide([big, small]) == [decide.Row(32_000, ("bfloat16",), (0.8, 0.9))]
    assert decide.decide([big, record(32_000, 0.99)]) == [decide.Row(151_936, ("bfloat16",), (0.8,))]
    assert decide.decide([record(151_936, 1.0), small]) == []  # a gap above
    assert decide.decide([big, record(151_936, 1.2)]) == []  # the worst of two sizes
    assert decide.decide([big, record(151_936, 1.1, level="hidden")]) == []
    assert decide.decide([big, record(151_936, 1.2, mode="forward")]) != []
    assert decide.decide([record(151_936, None)]) == decide.decide([]) == []
    rows = decide.decide([big, record(151_936, 0.9, "float32"), small])
    assert [(row.vocab, row.dtypes) for row in rows] == [(32_000, ("bfloat16",)), (151_936, ("float32",))]


def test_the_text_is_what_the_registry_takes() -> None:
    import torch

    gpu = {"name": "NVIDIA H100", "capability": "9.0"}
    results = {"machine": {"gpu": gpu}, "records": [record(151_936, 0.8), record(151_936, 0.9, "float32")]}
    text = decide.text(results, "gpu-h100.json")
    scope: dict[str, Any] = {"Default": Default, "torch": torch}
    exec(text, scope)
    both = Default("cuda", (9, 0), 151_936, (torch.bfloat16, torch.float32))
    assert scope["CUDA_DEFAULTS"] == (both, Default("triton"))
    assert "benchmarks/results/gpu-h100.json" in text
    assert "bfloat16, V=151936, from logits: 0.80 of the time" in text


def test_the_suite_measures_what_is_decided() -> None:
    both = {decide.TRITON, decide.CUDA}
    kinds = {(c.level, c.dtype, c.vocab) for c in GPU if c.mode == "train" and both <= set(c.contestants or ())}
    assert kinds >= {("logits", "bfloat16", 32_000), ("logits", "bfloat16", 151_936), ("logits", "float32", 151_936)}
    assert ("hidden", "bfloat16", 151_936) in kinds
    assert any(decide.UNLIMITED in (c.contestants or ()) for c in GPU)
