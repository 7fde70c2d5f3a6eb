"""Studies: plan and run variants of a recipe over several seeds, compare them, and write a page."""
