"""From groups to new weights: advantages, packing, token selection, rollout correction, and the learner that steps."""
