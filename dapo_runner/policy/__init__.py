"""The policy: a language model run over packed sequences, the attention between them, the prefixes they share, and
adapters.
"""
