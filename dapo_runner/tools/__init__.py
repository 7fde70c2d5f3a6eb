"""Commands beside training: supervised fine-tuning, studies, the live page, answer conversion. No core module imports
them."""
