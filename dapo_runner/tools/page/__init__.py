"""Runs in the browser: one file (`dapo report --html`), or served as it grows (`dapo watch`)."""
