"""The one exception type for faults that a user can cause."""


class EyasError(Exception):
    """Something is wrong with the input, the configuration or the machine.

    The message says what is wrong, where (file, row, config key) and what to do.
    Command lines print it without a traceback; anything else that escapes is a
    fault of Eyas and keeps its traceback.
    """
