"""Problems rewritten so that their answers are integers (DAPO, Appendix A): what a model is asked, the rules that its
reply is held to, and the journal that makes it go on after a kill.
"""
