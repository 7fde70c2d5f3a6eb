"""Commands other than training: supervised fine-tuning, studies, the web page, answer conversion. No core module
imports them."""
