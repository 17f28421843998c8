"""Training: the step, and the text, tokens, loop, checkpoints and generation around it."""
