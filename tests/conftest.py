"""Shared fixtures: which kernel backend a test runs on, and thread counts that do not leak between tests."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from dapo_runner.preflight.amx import disable_broken_amx

if importlib.util.find_spec("hypothesis") is not None:  # the tests of vLLM, and those on a GPU, do without
    from hypothesis import settings

    # How long an example takes says more of the machine and its neighbours than of the code.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")

# On some virtual machines torch's bfloat16 products would end the process otherwise.
disable_broken_amx()
# On an Intel Xeon, oneDNN's bfloat16 products with AMX gave NaN in rows of zeros beside rows of NaN, which the tests of
# the device path multiply on a CPU. A GPU's products do not, and the CPU path leaves such rows out.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Nothing asks the hub, nor tells it of a trainer; here and in what a test starts alike.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# As `dapo` does: each collection looks at the many objects of torch and transformers.
gc.set_threshold(50_000)

# Two test workers on a two-core machine with two threads each spend their time waiting for one another. The same holds
# for the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cpp",
        action="store_true",
        help="fail instead of skip when the compiled CPU extension dapo_kernels._C is missing",
    )
    parser.addoption(
        "--backends",
        default="torch,cpp",
        help="run the tests of every backend with these (triton: with TRITON_INTERPRET=1) and leave the others out",
    )
    parser.addoption(
        "--smoke",
        action="store_true",
        help="of the tests marked elsewhere, take every tenth parameter and the shortest of the suites they start",
    )


def pytest_collection_finish() -> None:
    """Full collections, of trainers and of what measures memory, leave out what the imports have made: a million
    objects, which take a quarter of a second.
    """
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is frozen at exit looks like a leak to some libraries


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames and "gpu_backend" not in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.getoption("--backends").split(","), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run for other backends than the CPU's repeats what depends on one, not the rest."""
    if config.getoption("--backends") != "torch,cpp":
        items[:] = [item for item in items if "backend" in getattr(item, "fixturenames", ())]
    if config.getoption("--smoke"):
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("elsewhere") is not None:
                by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out = {item for same in by_test.values() for item in same} - {
            item for same in by_test.values() for item in same[2::10] or same[:1]
        }
        items[:] = [item for item in items if item not in left_out]


def cpp_missing() -> str | None:
    """Why the C++ backend cannot be tested here, or None when it can."""
    if importlib.util.find_spec("dapo_kernels._C") is None:
        return "dapo_kernels._C is not built (run `make build` or `pip install .`)"
    return None


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test's body runs with this kernel backend. A missing extension is a skip with its reason."""
    from dapo_kernels import use_backend

    name: str = request.param
    reason = cpp_missing() if name == "cpp" else None
    if reason and request.config.getoption("--require-cpp"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with use_backend(name):
        yield name


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Put torch's thread count back after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
