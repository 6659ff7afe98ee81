"""What the index and the drafters promise, each in the slow and obvious way."""
