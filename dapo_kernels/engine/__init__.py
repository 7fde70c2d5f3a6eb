"""From validated records to losses and gradients: rows of logits (``rows.py``), chunks from hidden states
(``hidden.py``), the O(tokens) half (``tokens.py``); autograd and torch.compile in ``operators.py``."""
