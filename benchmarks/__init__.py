"""Benchmarks of dapo_kernels and dapo_runner.

``run.py`` measures a suite of ``configs.py``: problem (inputs) → truth (float64) → contestants and peers → harness
(check, memory, time) → report. ``bench_*.py`` measure training steps and the smoke suite. ``gpu.py`` runs GPU suites
in stages; ``decide.py`` and ``tuning.py`` turn them into defaults.
"""

from dapo_runner.preflight.amx import disable_broken_amx

disable_broken_amx()  # in this process and in those it starts, as the tests do
