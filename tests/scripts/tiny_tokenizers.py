"""Tokenizers of the kinds that models have, with a few hundred tokens, as folders with tokenizer.json and
tokenizer_config.json."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "The quick brown fox jumps over the lazy dog. In the beginning there was a question, and the answer was not there. "
    "Hello there! I am an assistant, and you are the user: what is the answer to 1 + 1? It is 2, and 12 is not 21. "
    "Be brief and be kind to the user. def main(): return 0  # the end of the function. Bye, and thank you very much. "
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def trained(pre_tokenizer, vocab_size, alphabet):
    """Vocabulary and merges of BPE trained on TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(words, special_tokens):
    split = pre_tokenizers.Split(Regex(words), "isolated")
    pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    vocab, merges = trained(pre_tokenizer, 340, sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    return tokenizer


def with_front(tokenizer, token):
    """A post-processor that puts a token before a text."""
    return processors.TemplateProcessing(f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))])


def save(tokenizer, folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def llama3_like(folder, special_tokens=("<|begin_of_text|>", "<|end_of_text|>"), **config):
    """Byte-level; a template puts the token before a text, and no add_bos_token says so."""
    tokenizer = byte_level(LLAMA3_WORDS, special_tokens)
    front = with_front(tokenizer, special_tokens[0])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), front])
    names = {"bos_token": special_tokens[0], "eos_token": special_tokens[1]}
    return save(tokenizer, folder, {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config})


def qwen_like(folder, special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **config):
    """Byte-level; nothing comes before a text."""
    tokenizer = byte_level(QWEN_WORDS, special_tokens)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"bos_token": None, "eos_token": special_tokens[0], "add_bos_token": False}
    return save(tokenizer, folder, {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config})


def llama2_like(folder, special_tokens=("<s>", "</s>"), **config):
    """As SentencePiece: a space before every text, and bytes for characters that are no tokens."""
    words, merges = trained(pre_tokenizers.Metaspace(), 200, [])
    pieces = ["<unk>", *special_tokens, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(words, key=words.get)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", *special_tokens)])
    tokenizer.post_processor = with_front(tokenizer, special_tokens[0])
    eos = {"__type": "AddedToken", "content": special_tokens[1], "special": True}
    names = {"bos_token": special_tokens[0], "eos_token": eos, "add_bos_token": True}
    return save(tokenizer, folder, {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config})
