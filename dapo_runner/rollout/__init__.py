"""Rollout engines, and what turns prompts into scored groups with them."""
