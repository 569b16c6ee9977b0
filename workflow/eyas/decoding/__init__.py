"""Speculative decoding with target and drafter, and how much of it the target accepts."""
