"""Load and clean data sets, render prompts, and walk over them."""
