"""Training: the step, and (as the book grows) data, loop, checkpoints and generation around it."""
