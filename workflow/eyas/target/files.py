"""Names of the files of a transformers model folder."""

# What a converted folder holds; the rule declares these files. config.json is written last.
MODEL_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json")

# Any of them makes a folder one with a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
