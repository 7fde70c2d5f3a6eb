"""Preflight checks: what a run will do and needs, what this machine lacks, what is installed."""
