"""What prepare_data.py and prepare_eval.py are made of: readers of files, tokenizers, chat templates, writers."""
