"""Rewards: rules that judge an answer, the overlong penalty, and the scorer that turns completions into samples."""
