"""Which prompts come next and which groups are kept: data files, made-up arithmetic, the prompt cursor, dynamic
sampling.
"""
