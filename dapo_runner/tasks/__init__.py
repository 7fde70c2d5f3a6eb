"""Models to begin with: the tiny one made on the spot, SmolLM2 from the package index."""
