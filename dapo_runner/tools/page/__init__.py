"""Show runs in the browser: as one file (`dapo report --html`), or served while they train (`dapo watch`)."""
