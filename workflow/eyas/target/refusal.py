"""Why a target's template or tokenizer cannot take a conversation."""


class TemplateRefusal(Exception):
    """Says why, in words that go into a row's `skipped`."""
