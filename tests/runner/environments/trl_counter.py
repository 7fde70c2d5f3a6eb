"""An environment as TRL's `environment_factory` takes it. It imports nothing of this project."""

from __future__ import annotations


class CounterEnv:
    """The policy has to bring a counter from `start` to `target`."""

    def reset(self, start: int = 0, target: int = 3, **kwargs) -> str | None:
        self.count, self.target, self._steps = start, target, 0
        return f"The counter is at {start}. Bring it to {target}."

    def increment(self, amount: int = 1) -> str:
        """
        Add to the counter.

        Args:
            amount: How much to add.

        Returns:
            The new value.
        """
        return self._add(amount)

    async def look(self) -> int:
        """
        Read the counter.
        """
        return self.count

    def get_reward(self) -> float:
        return 1.0 if self.count == self.target else 0.0

    def _add(self, amount: int) -> str:
        if amount > 5:
            raise ValueError("that is too much")
        self.count += amount
        return f"The counter is at {self.count}."
