"""Environments of other libraries with ``reset`` and ``step``: TextArena's games and OpenEnv's clients."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dapo_runner.environments.environment import Environment
from dapo_runner.errors import ConfigError

_TEXTARENA = threading.Lock()  # its games draw from Python's global random numbers


class TextArena(Environment):
    """A game of textarena, which the policy plays as player 0 and whose reward comes with its end.

    ``opponent`` makes the moves of all other players, from what they observe. Random numbers follow from the row, so
    that all episodes of a prompt play the same game.
    """

    def __init__(self, name: str, opponent: Callable[[str], str] | None = None, **settings: Any) -> None:
        """Make the game ``name``, e.g. `GuessTheNumber-v0`, with ``settings`` as its arguments. Raises ConfigError."""
        self.random = random.Random()
        try:
            make = import_module("textarena").make
            self.game = self._call(lambda: make(f"{name.removesuffix('-raw')}-raw", **settings))
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(
                f"env.kind: expected a game of textarena (`pip install textarena`), got {name!r}: {error}"
            ) from error
        self.opponent, self.n_players = opponent, 1 if opponent is None else 2

    def reset(self, row: Mapping[str, Any]) -> str:
        seed = zlib.crc32(repr(sorted(row.items())).encode())
        self._call(lambda: self.game.reset(num_players=self.n_players, seed=seed))
        return self._observe(is_done=False)[0]

    def step(self, text: str) -> tuple[str, float | None, bool]:
        return self._observe(self._move(text))

    def _observe(self, is_done: bool) -> tuple[str, float | None, bool]:
        """Return what player 0 observes once the others have moved."""
        while not is_done:
            player, found = self.game.get_observation()
            observed = "\n".join(text for sender, text, _ in found if sender != player)
            if player == 0:
                return observed, None, False
            assert self.opponent is not None
            is_done = self._move(self.opponent(observed))
        rewards, _ = self.game.close()
        return "", float(rewards[0]), True

    def _move(self, text: str) -> bool:
        is_done, _ = self._call(lambda: self.game.step(action=text))
        return bool(is_done)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call a game with the random numbers of this episode as Python's global ones."""
        with _TEXTARENA:
            others = random.getstate()
            random.setstate(self.random.getstate())
            try:
                return function()
            finally:
                self.random.setstate(random.getstate())
                random.setstate(others)


class OpenEnv(Environment):
    """A synchronous client of OpenEnv (`client.sync()`), or anything with its ``reset`` and ``step``.

    ``action`` makes the client's action of a turn, ``text`` what the policy sees of an observation.
    """

    def __init__(self, client: Any, action: Callable[[str], Any], text: Callable[[Any], str] = str) -> None:
        self.client, self.action, self.text = client, action, text

    def reset(self, row: Mapping[str, Any]) -> str:
        return self.text(self.client.reset().observation)

    def step(self, text: str) -> tuple[str, float | None, bool]:
        result = self.client.step(self.action(text))
        return self.text(result.observation), result.reward, result.done

    def close(self) -> None:
        self.client.close()
