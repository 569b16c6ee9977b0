"""The target's own responses to the prompts."""
