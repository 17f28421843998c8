"""What memory holds over time: recorded (`memory`), replayed (`replay`), told apart by what it is for (`timeline`)."""
