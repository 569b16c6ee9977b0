"""Hands hidden states of prefills over from an SGLang server, through files in memory.

Runs in the server's environment: torch and the standard library alone. It is told what to do by environment
variables, because a server gives its plugins no other channel:

- `EYAS_CAPTURE_DIR`: folder in memory for the dumps, of the server's user alone (0700). Not set: nothing is done.
- `EYAS_CAPTURE_LAYERS`: JSON list of decoder layers (0-based) whose outputs are captured.
- `EYAS_CAPTURE_WAIT`: seconds that a write waits for room before its request fails (default 30).
"""

FORMAT = "eyas.capture"
VERSION = "1"
