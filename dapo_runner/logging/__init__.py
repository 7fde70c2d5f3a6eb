"""Log and show a run: metrics, rollouts, progress, trackers, and the code behind the commands that read them."""
