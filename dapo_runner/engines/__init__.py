"""Rollout engines: transformers, vLLM, and vLLM servers with what runs inside them."""
