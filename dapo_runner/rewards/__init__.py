"""Rewards: rules that judge an answer, the overlong punishment, and the scoring that makes samples of completions."""
