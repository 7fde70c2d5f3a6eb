"""Environments of other libraries with ``reset`` and ``step``: TextArena's games and OpenEnv's clients."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dapo_runner.environments.environment import Answer, Environment
from dapo_runner.errors import ConfigError

_TEXTARENA = threading.Lock()  # its games draw from Python's global random numbers


class TextArena(Environment):
    """A game of textarena, which the policy plays as player 0 and whose reward comes with its end.

    ``opponent`` makes the moves of all other players, from what they observe and random numbers. All random numbers
    follow from the row, so that all episodes of a prompt play the same game.
    """

    def __init__(self, name: str, opponent: Callable[[str, random.Random], str] | None = None, **settings: Any) -> None:
        """Make the game ``name``, e.g. `GuessTheNumber-v0`, with ``settings`` as its arguments. Raises ConfigError."""
        self.opponent: Any = opponent
        self.random = random.Random()
        try:
            self.game = self._call(import_module("textarena").make, f"{name.removesuffix('-raw')}-raw", **settings)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"env.kind: expected a game of `pip install textarena`, got {name!r}: {error}") from error

    def reset(self, row: Mapping[str, Any]) -> str:
        self.random.seed(seed := zlib.crc32(repr(sorted(row.items())).encode()))
        self._call(self.game.reset, num_players=1 if self.opponent is None else 2, seed=seed)
        return str(self._observe().observation)

    def step(self, text: str) -> Answer:
        return self._observe(self._call(self.game.step, action=text)[0])

    def _observe(self, is_done: bool = False) -> Answer:
        """Return what player 0 observes once the others have moved."""
        while not is_done:
            player, found = self.game.get_observation()
            observed = "\n".join(text for sender, text, _ in found if sender != player)
            if player == 0:
                return Answer(observed, 0.0, False)
            is_done = self._call(self.game.step, action=self.opponent(observed, self.random))[0]
        return Answer("", self.game.close()[0][0], True)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function while the random numbers of this episode are Python's global ones."""
        with _TEXTARENA:
            others = random.getstate()
            random.setstate(self.random.getstate())
            try:
                return function(*arguments, **options)
            finally:
                self.random.setstate(random.getstate())
                random.setstate(others)


class OpenEnv(Environment):
    """A synchronous client of OpenEnv (`client.sync()`), or anything with its ``reset`` and ``step``.

    ``action`` makes the client's action of a turn, ``text`` what the policy sees of an observation, ``begin`` the
    keywords of ``reset`` from the row: without them the episodes of a prompt may be different games.
    """

    def __init__(
        self,
        client: Any,
        action: Callable[[str], Any],
        text: Callable[[Any], str] = str,
        begin: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda row: {},
    ) -> None:
        self.client, self.action, self.text, self.begin, self.close = client, action, text, begin, client.close

    def reset(self, row: Mapping[str, Any]) -> str:
        return self.text(self.client.reset(**self.begin(row)).observation)

    def step(self, text: str) -> Answer:
        result = self.client.step(self.action(text))
        return Answer(self.text(result.observation), result.reward, result.done)
