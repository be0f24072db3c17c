"""The state of training: weights at step 0, checkpoints, weights in and out."""
