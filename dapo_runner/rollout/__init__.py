"""Rollout engines, and the code that turns prompts into scored groups with them."""
