"""What a run writes and shows: metrics, rollouts, progress, trackers, and the commands that read them."""
