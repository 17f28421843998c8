"""Measuring: what machine this is (`machine`), how long things take (`timing`), what is kept (`rows`)."""
