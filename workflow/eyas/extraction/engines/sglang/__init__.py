"""The SGLang engine: a server with the capture plugin writes states of whole prompts into memory; they are checked,
copied into the shard and deleted. The server runs already, or a job starts it and never leaves it behind."""
