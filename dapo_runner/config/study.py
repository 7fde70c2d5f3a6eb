"""The settings of `dapo study`: one recipe, what its variants have otherwise, seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_runner.config.section import Name, NonNegativeInt, PositiveInt, Section


class VariantConfig(Section):
    """A row of the table."""

    name: Name  # of its runs' folder
    label: str | None = None  # null: the name
    over: Name | None = None  # a variant further up, whose overrides this one adds to
    overrides: dict[str, Any] = {}  # sections, or dotted keys
    against: Name | None = None  # the variant it is tested against; null: the row above


class FigureConfig(Section):
    """A picture: a panel for each curve, a line with its band for each variant."""

    name: Name  # of its file
    title: str  # above the picture
    variants: list[Name] = Field(min_length=1)  # a line for each
    curves: list[str] = Field(min_length=1)  # as in metrics.jsonl
    x: Literal["step", "tokens", "updates", "seconds"] = "step"  # the horizontal axis


class StudyConfig(Section):
    name: Name = "study"  # of the study's folder
    title: str = "Study"  # of its page
    about: str = ""  # a paragraph under the title
    base: str  # a YAML file, beside the study's own, or the name of a recipe
    output_dir: Path = Path("studies")  # the study lives in output_dir/name
    runs: Name | None = None  # another study, whose runs these are too: none is made again
    seeds: list[NonNegativeInt] = Field(min_length=1)  # a run of each variant with each seed
    overrides: dict[str, Any] = {}  # of the base, for every variant
    # A tiny model is made by each run for itself, or once for all variants of a seed (as the base makes it).
    start: Literal["each", "per_seed"] = "each"
    variants: list[VariantConfig] = Field(min_length=1)
    figures: list[FigureConfig] = []
    entropy_fit: list[Name] = []  # variants that accuracy is fitted to entropy of: arXiv 2505.22617, eq. 1
    threads: PositiveInt = 1  # CPU threads of a run

    @property
    def folder(self) -> Path:
        return self.output_dir / self.name

    @property
    def folder_of_runs(self) -> Path:
        return self.output_dir / (self.runs or self.name)

    @model_validator(mode="after")
    def _names(self) -> StudyConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: expected each once, got {self.seeds}")
        known: set[str] = set()
        for variant in self.variants:
            if variant.name in known:
                raise ValueError(f"variants: expected names that differ, got {variant.name!r} twice")
            for other in (variant.over, variant.against):
                if other is not None and other not in known:
                    raise ValueError(f"variants: {variant.name}: expected a variant further up, got {other!r}")
            known.add(variant.name)
        for figure in self.figures:
            if missing := [name for name in figure.variants if name not in known]:
                raise ValueError(f"figures: {figure.name}: expected variants of this study, got {missing[0]!r}")
        if missing := [name for name in self.entropy_fit if name not in known]:
            raise ValueError(f"entropy_fit: expected variants of this study, got {missing[0]!r}")
        return self
