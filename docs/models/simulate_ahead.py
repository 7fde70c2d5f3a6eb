"""A discrete-event model of `rollout.max_staleness`: seconds a step against steps ahead, group size, tail and GPUs.

    python -m docs.models.simulate_ahead --decode BASE SLOPE --train RATE --source "where these three come from"

Servers decode up to `slots` responses side by side; a token of each takes BASE + SLOPE·running seconds. Training takes
RATE tokens a second and GPU. None has a default: a rate is measured, and the page names where. Lengths are lognormal,
cut at the limit, and independent of what is accepted. With 0 steps ahead all GPUs generate, then all train; with more,
some generate for as long as the rest train, split as is best. Left out: prompts' prefill, prefixes computed anew after
new weights, and what a step takes that grows with neither tokens nor GPUs but for `sync`.

Three ways for a round to end: `rounds`, with its last response, as `rollout.partial=false` has it, but for its waits
before new weights; `cut`, with over-sampling by the factor given (`dapo_runner` does not have it), once as many groups
are there as are needed, the rest dropped, which favours short responses; `kept`, the next steps' prompts already under
way beside the last ones of this, still in their order: `rollout.partial`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

GPUS = (8, 16, 32, 64, 128)
WARM_UP = 2  # steps left out


@dataclass(frozen=True)
class Setting:
    gpus: int = 8
    ahead: int = 0
    ends: str = "rounds"  # or "cut", "kept"
    prompts: int = 64  # groups that a step trains on
    group: int = 16
    asked: float = 3.0  # times as many groups are asked for: dynamic sampling
    oversample: float = 1.25  # with "cut"
    median: float = 2000.0  # tokens of a response
    sigma: float = 1.0  # of their logarithm
    limit: int = 20480
    slots: int = 256  # responses that a server decodes side by side
    server_gpus: int = 1
    base: float = 0.0  # seconds a token
    slope: float = 0.0  # and for each response beside it
    train: float = 1.0  # tokens a second and GPU
    sync: float = 0.0  # seconds until new weights are with the servers


@dataclass(frozen=True)
class Found:
    """Means over the steps after the warm-up."""

    seconds: float  # a step
    generating: int  # GPUs
    age: float  # updates between the weights a step began with and those that it trains


class Server:
    """Decodes what is with it, all at the same pace, which depends on how many they are."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.running: list[tuple[float, int, int]] = []  # tokens decoded here by their end, step, group
        self.decoded = self.since = 0.0

    @property
    def pace(self) -> float:
        return self.setting.base + self.setting.slope * len(self.running)

    def advance(self, now: float) -> None:
        self.decoded += (now - self.since) / self.pace if self.running else 0.0
        self.since = now

    def ends(self) -> float:
        """When the next response does."""
        return self.since + max(0.0, self.running[0][0] - self.decoded) * self.pace if self.running else math.inf


def lengths(setting: Setting, dice: random.Random) -> Iterator[int]:
    while True:
        yield max(1, min(setting.limit, round(dice.lognormvariate(math.log(setting.median), setting.sigma))))


def simulate(setting: Setting, generating: int, steps: int = 8, seed: int = 0) -> Found:
    """With ``generating`` of the GPUs on the servers' side, or all in turn where nothing is ahead."""
    drawn = lengths(setting, random.Random(seed))
    training = setting.gpus - generating if setting.ahead else setting.gpus
    asked = round(setting.prompts * setting.asked * (setting.oversample if setting.ends == "cut" else 1.0))
    needed = round(setting.prompts * setting.asked)
    servers = [Server(setting) for _ in range(max(1, generating // setting.server_gpus))]
    queue: deque[tuple[int, int, int]] = deque()  # step, group, tokens
    open_samples: list[dict[int, int]] = []  # of each step those of each group that are not there yet
    tokens: list[list[int]] = []  # of each step those of each group
    released, begun, ended = 0, list[float](), list[float]()  # of training
    versions: list[int] = []  # weights that each step's sampling began with
    now, updating = 0.0, math.inf

    def complete(step: int) -> bool:
        return len(open_samples[step]) <= asked - needed

    while len(ended) < steps:
        # What may begin, begins.
        while released < steps:
            alone = setting.ends == "kept" or released == 0 or complete(released - 1)
            if released > len(ended) + setting.ahead or not alone:
                break
            step_tokens = [[next(drawn) for _ in range(setting.group)] for _ in range(asked)]
            tokens.append([sum(group) for group in step_tokens])
            open_samples.append(dict.fromkeys(range(asked), setting.group))
            queue.extend((released, place, n) for place, group in enumerate(step_tokens) for n in group)
            versions.append(len(ended))
            released += 1
        idle = [(len(each.running), place) for place, each in enumerate(servers)] if queue else []
        idle = [(load, place) for load, place in idle if load < setting.slots]
        heapq.heapify(idle)
        while idle and queue:
            load, place = heapq.heappop(idle)
            servers[place].advance(now)
            step, group, n = queue.popleft()
            heapq.heappush(servers[place].running, (servers[place].decoded + n, step, group))
            if load + 1 < setting.slots:
                heapq.heappush(idle, (load + 1, place))
        if math.isinf(updating) and len(begun) < released and complete(len(begun)):
            answered = [n for place, n in enumerate(tokens[len(begun)]) if place not in open_samples[len(begun)]]
            trained = sum(answered[: setting.prompts])
            begun.append(now)
            updating = now + trained / (setting.train * training) + setting.sync
            continue  # a step may be released by it
        # On to what happens next.
        server = min(servers, key=Server.ends)
        if updating <= server.ends():
            now, updating = updating, math.inf
            ended.append(now)
            continue
        now = server.ends()
        server.advance(now)
        _, step, group = heapq.heappop(server.running)
        open_samples[step][group] -= 1
        if not open_samples[step][group]:
            del open_samples[step][group]
            if setting.ends == "cut" and complete(step):
                queue = deque(item for item in queue if item[0] != step)
                for each in servers:
                    each.advance(now)
                    each.running = [item for item in each.running if item[1] != step]
                    heapq.heapify(each.running)
    ages = [step - version for step, version in enumerate(versions[:steps])]
    seconds = (ended[-1] - ended[WARM_UP - 1]) / (steps - WARM_UP)
    return Found(seconds, generating, statistics.mean(ages[WARM_UP:]))


def best(setting: Setting, steps: int = 8) -> Found:
    """Over the splits in quarters, or what whole servers allow."""
    if setting.ahead == 0:
        return simulate(setting, setting.gpus, steps)
    unit = max(setting.gpus // 8, setting.server_gpus)
    splits = range(2 * unit, setting.gpus, 2 * unit) if setting.gpus >= 4 * unit else range(unit, setting.gpus, unit)
    return min((simulate(setting, split, steps) for split in splits), key=lambda found: found.seconds)


def table(name: str, settings: dict[str, Setting], aheads: list[int], ends: list[str], steps: int) -> str:
    columns = [(0, "rounds"), *((ahead, end) for ahead in aheads if ahead for end in ends)]
    heads = " | ".join("in turn" if not ahead else f"{ahead} ahead, {end}" for ahead, end in columns)
    rows = []
    for label, setting in settings.items():
        found = [best(replace(setting, ahead=ahead, ends=end), steps) for ahead, end in columns]
        cells = [f"{found[0].seconds:.1f}"] + [
            f"{one.seconds:.1f} (× {found[0].seconds / one.seconds:.2f}, {one.generating} generate, age {one.age:.1f})"
            for one in found[1:]
        ]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return f"| {name} | {heads} |\n|---|{'---|' * len(columns)}\n" + "\n".join(rows)


def page(setting: Setting, aheads: list[int], ends: list[str], steps: int, source: str, gpus: list[int]) -> str:
    by_gpus = {str(n): replace(setting, gpus=n) for n in gpus}
    middle = replace(setting, gpus=gpus[len(gpus) // 2])
    sizes = (max(1, setting.group // 4), setting.group, 4 * setting.group)
    by_group = {str(n): replace(middle, group=n, prompts=max(1, setting.prompts * setting.group // n)) for n in sizes}
    by_tail = {f"{sigma:g}": replace(middle, sigma=sigma) for sigma in (0.25, 0.5, 1.0, 1.5)}
    tables = [
        table(name, settings, aheads, ends, steps)
        for name, settings in (
            ("GPUs", by_gpus),
            (f"group size, {middle.gpus} GPUs, as many responses", by_group),
            (f"σ of the lengths, {middle.gpus} GPUs", by_tail),
        )
    ]
    return f"""# Steps sampled ahead, simulated

Nothing here was measured: `docs/models/simulate_ahead.py` says what is in the model. Rates: a token takes
{setting.base:g} + {setting.slope:g}·running s on a server of {setting.server_gpus} GPUs, training {setting.train:g} tokens/s a GPU. Source: {source}.
{setting.prompts} groups of {setting.group} a step, {setting.asked:g} times as many asked; lengths lognormal, median {setting.median:g}, σ {setting.sigma:g}, cut at
{setting.limit}; {setting.slots} responses side by side on a server. Seconds a step, of {steps - WARM_UP} steps.

{(chr(10) * 2).join(tables)}
"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", type=float, nargs=2, required=True, metavar=("BASE", "SLOPE"), help="seconds")
    parser.add_argument("--train", type=float, required=True, metavar="RATE", help="tokens a second and GPU")
    parser.add_argument("--source", required=True, help="where the rates come from: a results file, a publication")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--ahead", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ends", nargs="+", choices=["rounds", "cut", "kept"], default=["rounds", "kept"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sync", type=float, default=0.0, help="seconds")
    for name in ("prompts", "group", "slots", "server_gpus", "limit"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setting, name))
    for name in ("asked", "oversample", "median", "sigma"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Setting, name))
    options = parser.parse_args()
    base, slope = options.decode
    given = (
        "prompts",
        "group",
        "asked",
        "oversample",
        "median",
        "sigma",
        "limit",
        "slots",
        "server_gpus",
        "train",
        "sync",
    )
    setting = Setting(base=base, slope=slope, **{name: getattr(options, name) for name in given})
    print(page(setting, options.ahead, options.ends, options.steps, options.source, options.gpus))


if __name__ == "__main__":
    main()
