"""What a run leaves behind and shows: metrics, rollouts, progress, trackers, the failed batch, and the commands that
read them.
"""
