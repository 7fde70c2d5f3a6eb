"""Adapters to trainers that people already have. Each is imported only when asked for by name."""
