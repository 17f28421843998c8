"""What memory holds over time: recorded (`memory`, or of `tensors`), replayed (`replay`), categorized (`timeline`)."""
