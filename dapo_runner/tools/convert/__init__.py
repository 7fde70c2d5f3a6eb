"""Rewrite problems so that their answers are integers (DAPO, Appendix A)."""
