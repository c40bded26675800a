"""What parka prepare and parka prepare-eval are made of: readers of files, tokenizers, chat templates, writers."""
