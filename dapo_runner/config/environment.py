"""The settings of environments: episodes of several turns with a tool, a game or a simulated user."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import PositiveFloat

from dapo_runner.config.section import BelowOne, Check, PositiveInt, Section


class EnvironmentConfig(Section):
    """Sample episodes of several turns in place of single responses."""

    kind: str | None = None  # module:Class; every episode makes an instance
    tools: list[str] = []  # functions that the policy may call, each as module:function
    max_turns: PositiveInt = 8  # turns of the policy in an episode
    max_turn_tokens: PositiveInt | None = None  # limit of a turn; null: what is left of rollout.max_response_tokens
    timeout: PositiveFloat = 60.0  # limit of a reset or of the answer to a turn; slower episodes are left out
    max_failed: BelowOne = 0.0  # share of a rank's episodes in a round that may fail

    def checks(self) -> Iterator[Check]:
        yield "kind", ":" in self.kind if self.kind else bool(self.tools), "module:Class, or env.tools"
        yield "tools", all(":" in name for name in self.tools), "module:name"
