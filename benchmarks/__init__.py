"""Benchmarks of dapo_kernels: one table of configurations, one harness, one report.

configs → problem (inputs) → truth (float64) → contestants, peers → harness (memory, check, clock) → report (bars,
cpu_report). ``run.py`` has them measured in processes of their own (``workers.py``, ``worker.py``), each under one of
the settings of ``allocators.py``. A CUDA device adds ``gpu_configs.py``, ``gpu_peers.py``, ``cuda_clock.py``,
``gpu_report.py``, and ``gpu.sh``, which its owner runs.
"""

from dapo_runner.preflight.amx import disable_broken_amx

disable_broken_amx()  # in this process and in those it starts, as the tests do
