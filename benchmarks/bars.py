"""Bars: figures that the project asked of itself before it measured, with what was found and whether it meets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.configs import LORA_HEADS

Record = dict[str, Any]
_GIB = 2**30


@dataclass(frozen=True)
class Bar:
    """The largest value that meets it, of the first row of kind "ours".

    Attributes:
        of: the value, from our row and the whole record; ``None`` where there is none.
        fields: of the configuration; those not named are as in a plain training row.
    """

    what: str
    limit: float
    of: Callable[[Record, Record], float | None]
    shown: Callable[[float], str]
    fields: dict[str, Any]

    def applies(self, record: Record) -> bool:
        plain = {"mode": "train", "live": 1.0, "clipped": 0.0, "kept": 0, "objective": "dapo", "dtype": "bfloat16"}
        plain |= {"isa": None, "lora": False}
        fields = {"kept": 0, "lora": False, **record.get("fields", {})}  # older records knew no other
        return all(fields.get(name) == value for name, value in {**plain, **self.fields}.items())


def over_denominator(ours: Record, record: Record) -> float | None:
    return ours.get("over_denominator")


def bandwidth(fields: dict[str, Any], ms: float) -> float:
    """GB/s, if the logits are read once and written once in that time."""
    return 2 * fields["n_tokens"] * fields["vocab"] * (4 if fields["dtype"] == "float32" else 2) / ms / 1e6


def fastest_denominator(records: Sequence[Record]) -> float | None:
    """Milliseconds: the smallest median that the denominator had in any process of these records.

    The same pass over the same memory takes up to twice as long in one process as in another, so that a ratio to the
    pass of one's own process says less than one to the fastest pass of all.
    """
    return min(
        (
            row["median_ms"] / row["over_denominator"]
            for record in records
            for row in record["rows"]
            if row["kind"] != "denominator" and "over_denominator" in row
        ),
        default=None,
    )


def over_fastest_pass(ours: Record, record: Record) -> float | None:
    fastest = fastest_denominator([record])
    return None if fastest is None or "median_ms" not in ours else ours["median_ms"] / fastest


def over_eager(ours: Record, record: Record) -> float | None:
    eager = next((row.get("median_ms") for row in record["rows"] if row["name"] == "eager"), None)
    return None if eager is None or "median_ms" not in ours else ours["median_ms"] / eager


def lora_over_plain(ours: Record, record: Record) -> float | None:
    """The LoRA head that leaves the head under it frozen."""
    lora = next((row.get("median_ms") for row in record["rows"] if row["name"] == LORA_HEADS[0]), None)
    return None if lora is None or "median_ms" not in ours else lora / ours["median_ms"]


def milliseconds(ours: Record, record: Record) -> float | None:
    return ours.get("median_ms")


def logprob_error(ours: Record, record: Record) -> float | None:
    return ours.get("errors", {}).get("logprob")


def beyond_gradients(ours: Record, record: Record) -> float | None:
    """GiB."""
    if "peak_extra_bytes" not in ours:
        return None
    return (ours["peak_extra_bytes"] - ours["gradient_bytes"]) / _GIB


def table(bars: Sequence[Bar], records: Sequence[Record]) -> str:
    """A line for every bar and configuration that it is about; bars without a configuration are named."""
    lines = ["| bar | configuration | measured | |", "| --- | --- | ---: | --- |"]
    for bar in bars:
        about = [record for record in records if bar.applies(record)]
        if not about:
            lines.append(f"| {bar.what} | none in this run | | |")
        for record in about:
            ours = next((row for row in record["rows"] if row["kind"] == "ours"), {})
            value = bar.of(ours, record)
            if value is None:
                lines.append(f"| {bar.what} | {record['config']} | {ours.get('status', 'no figure')} | |")
            else:
                met = "met" if value <= bar.limit else "not met"
                lines.append(f"| {bar.what} | {record['config']} | {bar.shown(value)} | {met} |")
    return "\n".join(lines)
