"""The code that turns prompts into scored groups, by an engine."""
