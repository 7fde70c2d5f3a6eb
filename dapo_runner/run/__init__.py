"""A run: what it is made of, opened or put back; its prompts answered; its steps."""
