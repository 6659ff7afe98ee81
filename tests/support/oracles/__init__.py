"""The promises of the index and the drafters, each in the slow and obvious way."""
