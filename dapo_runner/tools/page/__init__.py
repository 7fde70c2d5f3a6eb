"""A run in the browser: its curves and its rollouts, token by token, in one file (`dapo report --html`) or served as it
grows (`dapo watch`).
"""
