"""How near is near: no worse than a small multiple of eager PyTorch's own error against float64."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def as_accurate(
    got: Tensor, truth: Tensor, eager: Tensor, *, what: str, multiple: float = 2.0, scale: float | None = None
) -> None:
    """Assert that `got` lies as near to `truth` as `eager` does, by maximum and by root mean square.

    The floor is a few float32 (float64) roundings at the tensor's own scale, for the cases where eager is
    exact by luck; `scale` overrides that scale where the result is a difference of larger numbers.
    """
    assert got.shape == truth.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    if got.numel() == 0:
        return
    got = got.detach()
    error = (got.double() - truth.double()).abs()
    eager_error = (eager.double() - truth.double()).abs()
    largest = float(truth.double().abs().max()) if scale is None else scale
    floor = (2.0**-47 if got.dtype == torch.float64 else 2.0**-21) * largest
    worst, bound = float(error.max()), multiple * float(eager_error.max()) + floor
    assert worst <= bound, (
        f"{what}: max error {worst:.3e} at {int(error.argmax())}, allowed {bound:.3e} (scale {largest:.3e})"
    )
    rms, rms_of_eager = (float(x.square().mean().sqrt()) for x in (error, eager_error))
    rms_bound = multiple * rms_of_eager + floor
    assert rms <= rms_bound, f"{what}: rms error {rms:.3e}, allowed {rms_bound:.3e}"


def elementwise(got: Tensor, truth: Tensor, *, what: str, scale: float | None = None, slack: float = 1.0) -> None:
    """Assert every element, the small ones too: a relative bound by dtype plus a floor at the tensor's scale.

    The maximum of a softmax gradient sits on the target; this is what sees an error on the other V-1 tokens.
    """
    truth = truth.detach().double()
    largest = scale if scale is not None else float(truth.abs().max()) if truth.numel() else 0.0
    relative = {torch.float64: 1e-10, torch.float32: 2e-5}.get(got.dtype, EPS[got.dtype])
    floor = (1e-13 if got.dtype == torch.float64 else 5e-7) * largest
    if got.dtype == torch.float16:
        floor += 2.0**-24  # below the normal range float16 has an absolute spacing
    bounds = {"rtol": slack * relative, "atol": slack * floor}
    torch.testing.assert_close(got.double(), truth, **bounds, msg=lambda m: f"{what}: {m}")
