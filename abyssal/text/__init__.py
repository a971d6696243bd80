"""Between text and token ids: tokenizer, chat prompts and their parsing, incremental detokenization. No torch."""
