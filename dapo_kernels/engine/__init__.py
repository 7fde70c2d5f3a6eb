"""Compute losses and gradients from validated records: rows of logits (``rows.py``), chunks from hidden states
(``hidden.py``), the O(tokens) part (``tokens.py``); autograd and torch.compile in ``operators.py``."""
