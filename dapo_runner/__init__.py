"""A lean trainer that runs the whole DAPO algorithm around the fused losses of `dapo_kernels`."""
