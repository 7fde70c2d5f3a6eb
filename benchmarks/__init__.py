"""Benchmarks of dapo_kernels: one table of configurations, one harness, one report.

configs → problem (inputs) → truth (float64) → contestants, peers → harness (memory, check, clock) → report. ``run.py``
gives every configuration a process of its own (``worker.py``).
"""
