"""`eyas doctor` and `eyas verify`."""
