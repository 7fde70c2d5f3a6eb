"""Train on groups: advantages, packing, token selection, rollout correction and the learner."""
