"""Chat template to token ids and loss mask."""

from eyas.tokenization.shard import TokenShard, read_tokens, tokenize_shard

__all__ = ["TokenShard", "read_tokens", "tokenize_shard"]
