"""Which room imports which, read from the source: no arrow runs upwards, no module reaches itself."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the ground up. A room imports from those below; rooms of one line do not know each other.
LAYERS = (
    ("dapo_kernels.records", "dapo_kernels.memory"),
    ("dapo_kernels.objectives",),
    ("dapo_kernels.backends",),
    ("dapo_kernels.layout", "dapo_kernels.signature"),
    ("dapo_kernels.call", "dapo_kernels.head", "dapo_kernels.metrics"),
    ("dapo_kernels.engine",),
    ("dapo_kernels.sharding",),
    ("dapo_kernels.losses", "dapo_kernels.logprobs", "dapo_kernels.preference", "dapo_kernels.distillation"),
    ("dapo_kernels",),
    ("dapo_kernels.integrations",),
    ("dapo_runner.errors", "dapo_runner.packages"),
    ("dapo_runner.plugins", "dapo_runner.files", "dapo_runner.http", "dapo_runner.threads"),
    ("dapo_runner.types", "dapo_runner.timing", "dapo_runner.interrupt"),
    ("dapo_runner.config",),
    ("dapo_runner.parallel", "dapo_runner.environments"),
    ("dapo_runner.policy", "dapo_runner.data"),
    ("dapo_runner.rewards", "dapo_runner.engines"),
    ("dapo_runner.algorithms", "dapo_runner.evaluate", "dapo_runner.run.early_stop"),
    ("dapo_runner.rollout", "dapo_runner.checkpoint"),
    ("dapo_runner.logging", "dapo_runner.tiny_model"),
    ("dapo_runner.preflight", "dapo_runner.run.folder", "dapo_runner.run.frozen"),
    ("dapo_runner.run.fork",),
    ("dapo_runner.run",),
    ("dapo_runner.loop",),
    ("dapo_runner.tools",),
    ("dapo_runner",),
    ("dapo_runner.commands",),
    ("dapo_runner.cli",),
    ("dapo_runner.__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}


def read_imports(root: Path) -> dict[str, set[str]]:
    """What each module of the two packages under ``root`` imports of them."""
    files = {}
    for path in (file for package in ("dapo_kernels", "dapo_runner") for file in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def targets(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        assert node.level == 0, "imports here name the package they import from"
        within = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in files else str(node.module) for name in within]

    return {
        name: {found for node in ast.walk(ast.parse(path.read_text())) for found in targets(node) if found in files}
        for name, path in files.items()
    }


def room_of(module: str) -> str:
    rooms = [room for room in HEIGHT if f"{module}.".startswith(f"{room}.")]
    assert rooms, f"{module}: LAYERS does not say where it lives"
    return max(rooms, key=len)


def upward_arrows(imports: dict[str, set[str]]) -> list[str]:
    arrows = [(module, target) for module, targets in imports.items() for target in targets]
    rooms = [(room_of(module), room_of(target), f"{module} → {target}") for module, target in arrows]
    return sorted(arrow for room, other, arrow in rooms if room != other and HEIGHT[other] >= HEIGHT[room])


def test_no_arrow_runs_upwards_and_no_module_reaches_itself() -> None:
    imports = read_imports(ROOT)
    assert "dapo_kernels.layout" in imports["dapo_kernels.call"]
    assert upward_arrows(imports) == []
    graphlib.TopologicalSorter(imports).prepare()
