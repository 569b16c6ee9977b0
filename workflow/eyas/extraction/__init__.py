"""Hidden states of the target, shard by shard, and the manifest that says that all are there."""
