"""A tiny tokenizer for each chat template of tests/fixtures/chat_templates, of the kind of the model that has it."""

from tiny_tokenizers import llama2_like, llama3_like, qwen_like

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
KINDS = {
    "chatml": (qwen_like, QWEN, {"eos_token": "<|im_end|>"}),
    "llama3": (llama3_like, ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), {}),
    "mistral": (llama2_like, ("<s>", "</s>"), {}),
    "llama2": (llama2_like, ("<s>", "</s>"), {}),
    "zephyr": (llama2_like, ("<s>", "</s>"), {}),
    "gemma": (llama3_like, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), {}),
    "phi3": (llama2_like, ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), {}),
    "olmo2": (qwen_like, ("<|endoftext|>", "<|pad|>"), {"bos_token": "<|endoftext|>"}),
    "qwen25": (qwen_like, QWEN, {"eos_token": "<|im_end|>"}),
    "qwen3": (qwen_like, QWEN, {"eos_token": "<|im_end|>"}),
    "smollm3": (llama3_like, ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>"), {}),
}


def make_chat_tokenizer(name, folder):
    """Writes tokenizer.json and tokenizer_config.json, without the template, and returns the path of the former."""
    make, special_tokens, config = KINDS[name]
    return make(folder, special_tokens, **config)
