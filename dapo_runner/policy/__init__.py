"""The policy: a language model over packed sequences, its attention, shared prefixes, adapters and routing replay."""
