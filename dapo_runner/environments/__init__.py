"""Environments: conversations of several turns between the policy and a tool, a game or a simulated user."""
