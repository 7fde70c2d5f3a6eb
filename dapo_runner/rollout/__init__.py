"""Rollout engines, what turns prompts into completions: the protocol, transformers (runs anywhere), vLLM (fast), and
the probe that sees whether an engine holds the policy's weights.
"""
