"""Adapters to existing trainers. Each is imported only by its own name."""
