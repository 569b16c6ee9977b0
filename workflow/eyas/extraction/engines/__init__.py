"""What runs the target's prefill; each engine yields captured rows."""
