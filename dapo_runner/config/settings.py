"""Every setting, in typed sections that refuse unknown keys.

The defaults are the DAPO paper's (arXiv 2503.14476, Section 4.1), so a recipe states only where it departs
from it.
"""

from __future__ import annotations

import math
import re
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from dapo_runner.config.algorithms import check_name, with_algorithm
from dapo_runner.config.critic import CriticConfig
from dapo_runner.config.judge import JudgeConfig
from dapo_runner.config.rollout_server import ServerConfig
from dapo_runner.config.section import (
    Int,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class EarlyStopConfig(Section):
    """Ends a run by a figure of its evaluations. It goes by `metrics.jsonl` alone."""

    metric: str | None = None  # as logged, less its eval/; None: avg@k
    mode: Literal["max", "min"] = "max"
    patience: PositiveInt | None = 5  # evaluations in a row without a better one; None: any number
    min_delta: NonNegativeFloat = 0.0  # what counts as better
    target: float | None = None  # good enough

    @model_validator(mode="after")
    def _ends_somehow(self) -> EarlyStopConfig:
        if self.patience is None and self.target is None:
            raise ValueError("expected patience, target or both, got neither")
        return self


class RunConfig(Section):
    model_config = ConfigDict(populate_by_name=True)

    name: str = "dapo"
    output_dir: Path = Path("runs")  # the run lives in output_dir/name
    seed: NonNegativeInt = 0
    steps: PositiveInt = 320  # rollout steps
    max_tokens: PositiveInt | None = None  # end with the step by which as many were generated; None: no such end
    eval_every: NonNegativeInt = 5  # 0: only before the first and after the last step
    save_every: NonNegativeInt = 5  # 0: only after the last step
    keep: PositiveInt = 2  # checkpoints kept; older ones are removed
    async_save: bool = False  # train on while a checkpoint is written, where ranks share the weights; copies them first
    early_stop: EarlyStopConfig | None = None
    device: str = "auto"  # auto: cuda where there is one, else cpu
    grace: PositiveFloat = 20.0  # seconds from SIGTERM to the kill: a step that takes longer is given up
    threads: PositiveInt | None = None  # CPU threads; None leaves torch's choice
    from_: str | None = Field(
        default=None, alias="from"
    )  # RUN@STEP: start from that checkpoint of another run's folder

    @property
    def forked_at(self) -> int:
        """The step that the run starts after: that of its fork, or 0."""
        return 0 if self.from_ is None else int(self.from_.rpartition("@")[2])

    @field_validator("from_")
    @classmethod
    def _run_and_step(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(r".+@\d+", value) is None:
            raise ValueError(f"expected RUN@STEP, a run's folder and a step it has a checkpoint of, got {value!r}")
        return value


class WarmupConfig(Section):
    """The short supervised warm-up that gives the tiny model something to explore with."""

    steps: NonNegativeInt = 300
    batch_size: PositiveInt = 64
    examples: PositiveInt = 2000
    lr: PositiveFloat = 1e-3
    repeat: Annotated[float, Field(ge=0, lt=1)] = 0.0  # probability that a line of an example comes again, each time
    stop_at: Share | None = None  # end early, once this share of training problems it has not seen is solved
    stop_below_cut: Share | None = None  # or once no more than this share of its answers to them is cut


class TinyModelConfig(Section):
    """A small transformer with a tokenizer of its own, made on the spot: no download."""

    layers: PositiveInt = 2
    hidden_size: PositiveInt = 128
    heads: PositiveInt = 4
    intermediate_size: PositiveInt = 512
    warmup: WarmupConfig = WarmupConfig()

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> TinyModelConfig:
        if self.hidden_size % self.heads:
            raise ValueError(f"heads must divide hidden_size={self.hidden_size}, got {self.heads}")
        return self


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) through peft: they alone train, and switched off they leave the reference.

    There is no dropout: two passes over one policy must give one answer. The rollout engine serves the merged weights,
    rounded to `model.dtype`: in bfloat16 it lags behind by what that rounding hides (docs/vllm.md).
    """

    rank: PositiveInt = 32
    alpha: PositiveInt = 64
    targets: str | list[str] = "all-linear"  # names of modules; all-linear is every linear layer but the head


class ModelConfig(Section):
    path: str | None = None  # a folder in transformers' format or a hub name
    tiny: TinyModelConfig | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["auto", "sdpa", "flash", "varlen"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False  # torch.compile for what lies between the matrix products of a layer; costs some 10 s once
    lora: LoraConfig | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            given = "neither" if self.path is None else "both (set the unwanted one to null)"
            raise ValueError(f"expected exactly one of 'path' and 'tiny', got {given}")
        return self


class ArithmeticConfig(Section):
    """Generated problems `a ? b`. The split is by problem, so the held-out ones never occur in training."""

    operators: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    operands: Annotated[Int, Field(ge=2, le=8)] = 2
    min_digits: PositiveInt = 1
    max_digits: Annotated[Int, Field(gt=0, le=9)] = 2
    even_digits: bool = False  # as many operands of each length; else of each value, and most are of max_digits
    train_size: PositiveInt = 4096
    eval_size: PositiveInt = 256
    seed: NonNegativeInt = 0  # of the problems and the split; apart from run.seed so that runs can share one task

    @model_validator(mode="after")
    def _digits_in_order(self) -> ArithmeticConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits must be ≤ max_digits={self.max_digits}, got {self.min_digits}")
        if self.operands * self.max_digits > 18:
            raise ValueError(f"operands × max_digits must be ≤ 18, got {self.operands} × {self.max_digits}")
        return self


class ColumnsConfig(Section):
    """Which columns of a data set are what: docs/your-own.md."""

    prompt: str  # a text, or a list of chat messages {role, content}
    answer: str | None = None  # the ground truth; None: the reward wants none
    choices: str | None = None  # the texts to choose from, shown as A. B. …; the answer becomes one of these letters
    source: str = "data_source"  # what evaluation figures are told apart by, where a row has it


class EvalSetConfig(Section):
    """One of several evaluation sets."""

    path: Path  # as data.path
    subset: str | None = None
    split: str = "test"
    format: Literal["auto", "dapo", "gsm8k"] = "auto"
    columns: ColumnsConfig | None = None  # None: those of data.columns
    size: PositiveInt | None = None  # the first so many problems; None: all


class DataConfig(Section):
    path: Path | None = None  # a .jsonl or .parquet file, or a Hugging Face data set: a folder or its name on the hub
    subset: str | None = None  # of a Hugging Face data set
    split: str = "train"
    format: Literal["auto", "dapo", "gsm8k", "arithmetic"] = "auto"
    columns: ColumnsConfig | None = None  # None: those of the format
    system: str | None = None  # a system message before every prompt that has none
    template: str = "dapo"  # dapo | plain | a text with {question}; plain where columns are given
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: where the tokenizer has one
    dedupe: bool = True
    on_conflict: Literal["drop", "first", "error"] = "drop"  # one prompt, several answers: which of them is right?
    eval_path: Path | None = None
    eval_format: Literal["auto", "dapo", "gsm8k"] = "auto"
    eval_size: NonNegativeInt = 256  # held-out problems: the first of eval_path, else cut from the training file
    eval: dict[Name, EvalSetConfig] = {}  # several evaluation sets by name, in place of eval_path and eval_size
    limit: PositiveInt | None = None  # only the first so many problems of path, repeated rows not counted
    arithmetic: ArithmeticConfig = ArithmeticConfig()

    @model_validator(mode="before")
    @classmethod
    def _plain_template_for_columns(cls, raw: Any) -> Any:
        """The recipe's instruction is for mathematics, which columns of one's own need not hold."""
        named = isinstance(raw, dict) and raw.get("columns") is not None
        return {"template": "plain", **raw} if named else raw

    @model_validator(mode="after")
    def _path_or_generator(self) -> DataConfig:
        if self.format == "arithmetic":
            if self.path is not None or self.eval_path is not None or self.eval or self.columns is not None:
                raise ValueError(
                    "format 'arithmetic' generates its problems: path, columns, eval_path and eval must be null"
                )
        elif self.path is None:
            raise ValueError(
                "path: expected a .jsonl or .parquet file or a Hugging Face data set (or format: arithmetic), got null"
            )
        if self.columns is not None and self.format != "auto":
            raise ValueError(f"format: expected auto beside columns, which say what a row holds, got {self.format}")
        if self.eval and self.eval_path is not None:
            raise ValueError(f"eval_path: expected null beside eval, which names every set, got {self.eval_path}")
        if self.template not in ("dapo", "plain") and "{question}" not in self.template:
            raise ValueError(
                f"template: expected 'dapo', 'plain' or a text with {{question}} in it, got {self.template!r}"
            )
        return self


class CorrectionConfig(Section):
    """What is done about engine and learner disagreeing. Formulas: dapo_runner.update.correction."""

    weights: Literal["token", "sequence"] | None = None  # truncated importance weights
    cap: PositiveFloat = 2.0
    mask: Literal["token", "sequence"] | None = None
    bound: Annotated[float, Field(gt=1)] = 2.0  # masked beyond this ratio, or below its inverse

    @property
    def enabled(self) -> bool:
        return self.weights is not None or self.mask is not None


class ProbeConfig(Section):
    """After each sync the engine answers a few training prompts, and the learner says how likely those answers are."""

    prompts: NonNegativeInt = 8  # 0: no probe
    tokens: PositiveInt = 4  # of each answer
    bound: PositiveFloat | None = None  # of the mean |Δ log-prob|; None: 0.001 in float32, 0.2 in bfloat16


class VLLMConfig(Section):
    """vLLM, in this process or as `dapo serve` starts it. The first two are for the CPU, the rest for GPUs."""

    kv_cache_gib: PositiveFloat = 2.0
    compile: bool = False  # costs about a minute at the start
    gpu_memory: Share = 0.5  # share of the GPU's memory that weights and cache may take
    cuda_graphs: bool = True
    sleep: bool = True  # weights and cache leave the GPU while the policy trains; not those of a server


StopStrings = list[Annotated[str, Field(min_length=1)]]


class RolloutConfig(Section):
    engine: Literal["hf", "vllm", "server"] = "hf"
    vllm: VLLMConfig = VLLMConfig()
    server: ServerConfig = ServerConfig()
    ahead: NonNegativeInt = 0  # server: steps that are sampled while an earlier one trains; 0: one after the other
    partial: bool = True  # ahead: responses under way go on under new weights; False: they end before these come
    probe: ProbeConfig = ProbeConfig()
    correction: CorrectionConfig = CorrectionConfig()
    group_size: PositiveInt = 16  # 1: where nothing is compared within a group
    temperature: PositiveFloat = 1.0
    # Where one of these three truncates, the rollout distribution is not the policy's and the ratio is biased, unless
    # sampling_mask has the learner's log-probs be those of what was left to sample from.
    top_p: Share = 1.0
    top_k: PositiveInt | None = None  # None: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # of the likeliest token's probability
    sampling_mask: bool = False
    stop: StopStrings = []  # a response ends where one of them is complete
    max_prompt_tokens: PositiveInt = 2048
    max_response_tokens: PositiveInt = 20480
    max_batch_sequences: PositiveInt = 256  # responses that the engine decodes side by side


class CurriculumConfig(Section):
    """Which training prompts are asked when: dapo_runner.sampling.curriculum."""

    by: Literal["column", "pass_rate"]
    column: str = "difficulty"  # by column: holds a number in every row
    larger_is: Literal["harder", "easier"] = "harder"
    start: Share = 0.25  # by column: the easiest share of the prompts that a run begins with
    steps: PositiveInt = 100  # by column: rollout steps after which all prompts are in play
    # By pass_rate: a prompt rests for so many epochs where a share of `low` of its samples or less was right, or of
    # `high` or more.
    low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    high: Share = 1.0
    rest: PositiveInt = 2

    @model_validator(mode="after")
    def _low_below_high(self) -> CurriculumConfig:
        if self.low >= self.high:
            raise ValueError(f"low: expected less than high={self.high:g}, got {self.low:g}")
        return self


class SamplerConfig(Section):
    prompts_per_step: PositiveInt = 512
    filter_groups: bool = True  # dynamic sampling; False trains on every group
    # What keeps a group: samples right and wrong, or rewards that vary (before the length term), for graded ones.
    filter_on: Literal["correctness", "reward"] = "correctness"
    initial_acceptance: Share = 1 / 3  # share of groups expected to be mixed before any were seen (paper: 1536 for 512)
    max_rounds: PositiveInt = 10  # generation rounds per step
    # server: prompts asked for each that is needed. What still runs once the needed are answered is dropped.
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    max_age: NonNegativeInt = 1  # steps that a group left over may wait; older ones are dropped and counted
    on_exhausted: Literal["train_partial", "error"] = "error"
    curriculum: CurriculumConfig | None = None  # None: all prompts, in a new order every epoch


class OverlongConfig(Section):
    soft_punishment: bool = True
    max_length: PositiveInt | None = None  # L_max of Eq. 13; None: rollout.max_response_tokens
    cache_length: PositiveInt = 4096  # L_cache of Eq. 13: the stretch over which the punishment grows to −1
    filter: bool = False  # take truncated samples out of the loss


# Rules that hold a response against the ground truth of its prompt.
RULES = ("dapo", "gsm8k", "integer", "math", "choice", "exact", "fuzzy", "json", "code", "judge")


def _check_use(value: str) -> str:
    if value not in RULES and ":" not in value:
        raise ValueError(f"expected one of {', '.join(RULES)} or module:function, got {value!r}")
    return value


RewardName = Annotated[str, AfterValidator(_check_use)]


class RewardPart(Section):
    """One of several rewards: their weighted sum is what trains."""

    use: RewardName
    weight: float = 1.0
    name: Name | None = None  # in figures; None: that of the rule or the function

    @property
    def label(self) -> str:
        return self.name or self.use.rpartition(":")[2]


class CallsConfig(Section):
    """How functions of a batch are called. A failed call is one that raises, is late, or returns no rewards."""

    prompts: PositiveInt = 1  # of one call, with all their responses
    concurrency: PositiveInt | None = None  # calls at a time, a function's in threads; None: 1, of an async one 64
    retries: NonNegativeInt = 2  # of a failed call
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the calls that may fail for good, rounded up


class CodeConfig(Section):
    """Kind code. Each program runs in a process of its own."""

    deadline: PositiveFloat = 10.0  # seconds for one program, after which it is killed
    memory_mb: PositiveInt = 1024
    workers: PositiveInt = 2  # programs at a time


class RewardKLConfig(Section):
    """A penalty on every token of a response: coef × an estimate of the KL divergence to the reference."""

    coef: PositiveFloat
    estimator: Literal["k1", "k2", "k3"] = "k1"  # docs/objectives.md; of the log-probs before the step's updates


class RewardConfig(Section):
    # dapo | gsm8k | integer | math | choice | exact | fuzzy | json | code | judge | module:function
    kind: RewardName = "dapo"
    parts: list[RewardPart] = []  # several of them in its place; the first says what is right
    correct: float = 1.0
    wrong: float = -1.0
    boxed_fallback: bool = False  # kind dapo: read the last \boxed{} when no answer line is found
    fuzzy_threshold: Share = 0.9  # kind fuzzy: the similarity from which an answer is right
    json_schema: Path | None = None  # kind json: a file; None: the answer of each row is its schema
    deadline: PositiveFloat = 5.0  # kinds math and json: seconds for one answer
    workers: PositiveInt = 2  # kind math: processes
    code: CodeConfig = CodeConfig()
    judge: JudgeConfig | None = None
    calls: CallsConfig = CallsConfig()
    # Kind module:function: seconds for one call; judge at an endpoint: for one request. None: no deadline.
    plugin_deadline: PositiveFloat | None = 300.0
    overlong: OverlongConfig = OverlongConfig()
    kl: RewardKLConfig | None = None  # advantages per token: taken off their rewards

    @property
    def uses(self) -> list[str]:
        """The rules and functions in use; the first says what is right."""
        return [part.use for part in self.parts] or [self.kind]

    @model_validator(mode="after")
    def _right_beats_wrong(self) -> RewardConfig:
        if self.correct <= self.wrong:
            raise ValueError(f"correct must be > wrong={self.wrong:g}, got {self.correct:g}")
        return self

    @model_validator(mode="after")
    def _judge_in_use(self) -> RewardConfig:
        if "judge" in self.uses and self.judge is None:
            raise ValueError("judge: expected a section that says which model judges (judge.model), got none")
        if self.judge is not None and "judge" not in self.uses:
            raise ValueError("judge: expected kind=judge or a part that uses it, without which it has no effect")
        return self

    @model_validator(mode="after")
    def _parts_have_names_of_their_own(self) -> RewardConfig:
        if self.parts and self.kind != type(self).model_fields["kind"].default:
            raise ValueError(f"kind: expected none beside parts, got {self.kind!r}")
        labels = [part.label for part in self.parts]
        if len(set(labels)) < len(labels):
            raise ValueError(f"parts: expected a name of its own for each, got {', '.join(labels)}")
        return self


class SegmentsConfig(Section):
    """Segment Policy Optimization (arXiv 2505.23564): advantages of the parts of a response. docs/spo.md."""

    kind: Literal["chain", "tree"]
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.9  # ρ: a token less likely than that is a cut point
    mask: bool = True  # only cut points train
    interval: PositiveInt = 5  # chain: cut points in a segment
    samples: PositiveInt = 9  # chain: continuations that the value of a segment's beginning is the mean of
    # tree: children of a node, by level; None: rollout.group_size in three factors that differ least, or in two.
    branching: Annotated[list[Annotated[Int, Field(ge=2)]], Field(min_length=2)] | None = None
    # tree: of a segment, but on the last level, where it ends the response; None: as many as every level can have.
    tokens: PositiveInt | None = None
    normalize: bool = False  # tree: over the standard deviation of the siblings
    per_step: PositiveInt | None = None  # tree: its responses that a step trains on, the rest later; None: all at once

    @model_validator(mode="after")
    def _of_its_kind(self) -> SegmentsConfig:
        others = {"chain": ("branching", "tokens", "normalize", "per_step"), "tree": ("interval", "samples")}
        unused = [name for name in others[self.kind] if getattr(self, name) != _default(type(self), name)]
        if self.kind == "tree" and not self.mask and self.threshold != _default(type(self), "threshold"):
            unused.append("threshold")
        if unused:
            raise ValueError(f"{unused[0]}: expected none with kind={self.kind}, which has no use for it")
        return self


def _default(section: type[Section], name: str) -> Any:
    return section.model_fields[name].default


class TreeShape(NamedTuple):
    """Children of a node by level, from the root down, and tokens of a segment but on the last level."""

    branching: tuple[int, ...]
    tokens: int

    @property
    def leaves(self) -> int:
        """Responses of a whole tree."""
        return math.prod(self.branching)

    @property
    def before_last(self) -> int:
        """Tokens of a response in front of the last level."""
        return self.tokens * (len(self.branching) - 1)


def steps_of_tree(leaves: int, per_step: int) -> int:
    """Over how many steps a tree with so much to train on is trained, as `DynamicSampler.spread` takes it apart."""
    steps = 0
    while leaves:
        leaves -= math.ceil(leaves / math.ceil(leaves / per_step))
        steps += 1
    return steps


def _factors(number: int) -> tuple[int, ...]:
    """Three factors that differ least, or where there are none two, the largest first; empty of a prime."""
    divisors = [divisor for divisor in range(number - 1, 1, -1) if number % divisor == 0]
    for n in (3, 2):
        found = [chosen for chosen in combinations_with_replacement(divisors, n) if math.prod(chosen) == number]
        if found:
            return min(found, key=lambda factors: factors[0] - factors[-1])
    return ()


BY_TOKEN = ("gae", "returns", "group_returns")  # advantages of single tokens, made once a step is sampled
COMPARING = ("group_std", "group_mean", "batch_std", "leave_one_out", "group_returns")  # samples of one prompt


class AdvantageConfig(Section):
    # Formulas and papers: dapo_runner.update.advantage.
    kind: Literal[
        "group_std",
        "group_mean",
        "batch_std",
        "batch_mean",
        "batch_whitened",
        "leave_one_out",
        "gae",
        "returns",
        "group_returns",
    ] = "group_std"
    eps: PositiveFloat = 1e-6
    # Of the last three, which are per token: dapo_runner.update.returns.
    gamma: Share = 1.0
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95  # gae
    whiten: bool = True  # over the tokens of the step
    segments: SegmentsConfig | None = None  # in the place of kind

    @model_validator(mode="after")
    def _one_or_the_other(self) -> AdvantageConfig:
        if self.segments is not None and self.kind != _default(type(self), "kind"):
            raise ValueError(f"kind: expected none beside segments, which take its place, got {self.kind}")
        return self

    @property
    def by_token(self) -> bool:
        return self.kind in BY_TOKEN


class LossConfig(Section):
    objective: str = "dapo"  # a name in dapo_kernels.OBJECTIVES
    overrides: dict[str, Any] = {}  # fields of dapo_kernels.Objective, passed through
    reference: str | None = None  # kl_coef ≠ 0: the model the penalty refers to; None: the one training starts from
    # The reference follows the policy: after each step it is this share of itself and the rest of the policy.
    reference_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    old_logprobs: Literal["learner", "rollout"] = "learner"  # whose log-probs are the ratio's denominator
    routing_replay: bool = False  # mixtures of experts: updates go to the experts that the old log-probs came from
    chunk_bytes: PositiveInt | None = None

    @field_validator("overrides", mode="after")
    @classmethod
    def _plain_values(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        return {name: _plain(value) for name, value in overrides.items()}


def _plain(value: Any) -> Any:
    """What a field of an objective may be given as text: `3e-4`, alone or in a list, and `yes`."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)


class PreferenceConfig(Section):
    """Iterated DPO: pairs made from each group by reward take the place of advantages and objective."""

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # formulas: docs/objectives.md
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # sigmoid: share of pairs the wrong way round
    pairs_per_group: PositiveInt = 1  # best against worst, second best against second worst, …
    reference: Literal["start", "step"] = "start"  # loss.reference or the start; or the policy as the step began

    @model_validator(mode="after")
    def _smoothed_sigmoid(self) -> PreferenceConfig:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing: expected loss_type=sigmoid beside it, got {self.loss_type}")
        return self


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = 20  # linear, in rollout steps
    warmup_updates: NonNegativeInt | None = None  # in updates, in its place; the schedule then goes by updates too
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up: dapo_runner.update.schedule
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of lr at which linear and cosine end
    decay_steps: PositiveInt | None = None  # the rollout step after which they do; None: run.steps
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat | None = 1.0  # None: no clipping
    mini_batch_size: PositiveInt | None = 512  # responses per update; None: one update per rollout step
    token_budget: PositiveInt = 22528  # packed positions per micro-batch


class ParallelConfig(Section):
    """How the processes that torchrun starts, one for each GPU, share a run."""

    gpus: PositiveInt = 1  # what --dry-run and --simulate plan with; more than 1: so many processes have to be there
    replicate: PositiveInt = 1  # copies of the weights, each sharded over gpus / replicate (HSDP)
    shard: PositiveInt | None = None  # GPUs that hold one copy together; None: gpus / replicate
    reshard_after_forward: bool = True  # False: layers are gathered once an update pass, and whole until its backward
    sequence: PositiveInt = 1  # GPUs that share the positions of one micro-batch
    rollout_tensor: PositiveInt = 1  # GPUs that share one copy of the rollout engine's weights
    timeout: PositiveFloat = 1800.0  # seconds a rank waits for another: longer than the slowest rollout takes

    @model_validator(mode="after")
    def _groups_divide_gpus(self) -> ParallelConfig:
        for name in ("sequence", "rollout_tensor", "replicate"):
            if self.gpus > 1 and self.gpus % getattr(self, name):
                raise ValueError(f"{name}: expected a divisor of gpus={self.gpus}, got {getattr(self, name)}")
        return self


class EvaluationConfig(Section):
    k: PositiveInt = 32  # samples per problem
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: Share = 0.7
    top_k: PositiveInt | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: StopStrings | None = None  # None: rollout.stop
    max_response_tokens: PositiveInt | None = None  # None: rollout.max_response_tokens
    seed: NonNegativeInt = 1234


class RolloutLogConfig(Section):
    """Which responses are kept for `dapo show`."""

    groups: NonNegativeInt | None = 32  # of each step, the first in the order of their prompts; None: all, 0: none
    max_gb: PositiveFloat = 1.0  # all steps together, compressed; beyond it the oldest steps are removed


class TrainingLogConfig(RolloutLogConfig):
    """And how much of those that are trained on."""

    per_token: bool = False  # also their tokens, each with its log-probs, entropy, ratio and what the loss made of it


class WandbConfig(Section):
    project: str = "dapo"
    entity: str | None = None  # None: that of the login
    mode: Literal["online", "offline"] = "online"  # offline: written to the run's folder; `wandb sync` sends it later


class MLflowConfig(Section):
    experiment: str = "dapo"
    tracking_uri: str | None = None  # None: MLflow's own default


class TrackioConfig(Section):
    project: str = "dapo"
    space: str | None = None  # a Hugging Face Space to log to; None: this machine


class LoggingConfig(Section):
    progress: Literal["auto", "live", "plain", "off"] = "auto"  # auto: live on a terminal, else plain lines
    rollouts: TrainingLogConfig = TrainingLogConfig()
    evaluations: RolloutLogConfig = RolloutLogConfig(groups=None)  # the answers to held-out problems
    tensorboard: bool = False
    wandb: WandbConfig | None = None
    mlflow: MLflowConfig | None = None
    trackio: TrackioConfig | None = None
    samples: NonNegativeInt = 8  # of each step and evaluation, in the trackers' tables; 0: no tables


class Config(Section):
    """Everything a run depends on, and the sizes that follow from it. `checks.py` knows which sections fit."""

    algorithm: str | None = None  # a row of dapo_runner.config.algorithms: what it sets is the default of every section
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig | None = None
    loss: LossConfig = LossConfig()
    preference: PreferenceConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _parts_are_graded(cls, raw: Any) -> Any:
        """With several rewards, groups are kept for the spread of their sum, unless the recipe says otherwise."""
        reward, sampler = (raw.get(name) for name in ("reward", "sampler")) if isinstance(raw, dict) else (None, None)
        chosen = isinstance(sampler, dict) and ("filter_on" in sampler or not sampler.get("filter_groups", True))
        if not isinstance(reward, dict) or not reward.get("parts") or chosen:
            return raw
        return {**raw, "sampler": {**(sampler or {}), "filter_on": "reward"}}

    @model_validator(mode="before")
    @classmethod
    def _algorithm_below_the_recipe(cls, raw: Any) -> Any:
        return with_algorithm(raw)  # before the one above: pydantic goes from the last to the first

    @field_validator("algorithm")
    @classmethod
    def _in_the_table(cls, value: str | None) -> str | None:
        if value is not None:
            check_name(value)
        return value

    @property
    def run_dir(self) -> Path:
        return self.run.output_dir / self.run.name

    @property
    def responses_per_step(self) -> int:
        return self.sampler.prompts_per_step * self.rollout.group_size

    @property
    def trained_per_step(self) -> int:
        """Responses of a full step that updates are made from."""
        if self.preference is None:
            return self.responses_per_step
        return 2 * self.preference.pairs_per_group * self.sampler.prompts_per_step

    @property
    def mini_batch_size(self) -> int:
        size = self.optimizer.mini_batch_size or self.trained_per_step
        return size if self.preference is None else min(size, self.trained_per_step)

    @property
    def updates_per_step(self) -> int:
        return self.trained_per_step // self.mini_batch_size

    @property
    def decay_steps(self) -> int:
        return self.optimizer.decay_steps or self.run.steps

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response that an engine may be asked for."""
        responses = (self.rollout.max_response_tokens, self.evaluation.max_response_tokens or 0)
        return self.rollout.max_prompt_tokens + max(responses)

    @property
    def tree(self) -> TreeShape | None:
        """Of `advantage.segments`, kind tree; without levels where rollout.group_size is a prime."""
        segments = self.advantage.segments
        if segments is None or segments.kind != "tree":
            return None
        branching = tuple(segments.branching or _factors(self.rollout.group_size))
        tokens = segments.tokens or self.rollout.max_response_tokens // max(1, len(branching))
        return TreeShape(branching, tokens)

    @property
    def overlong_max_length(self) -> int:
        """L_max of Eq. 13."""
        return self.reward.overlong.max_length or self.rollout.max_response_tokens
