"""Start or resume a run, and the steps of its loop."""
