"""The target model: fetching and building its folder, its tokenizer, its weights and layers."""
