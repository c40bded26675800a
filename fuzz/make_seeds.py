#!/usr/bin/env python3
"""Makes fuzz/seeds: small files of every kind that Parka reads. Needs the standard library only."""
import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEEDS = ROOT / "fuzz" / "seeds"
DIVIDER = b"\n%%\n"  # between the files of a target that takes several
ELEMENT_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}


def seed(target, name, content):
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def safetensors(tensors, metadata=None):
    """A file with these tensors, {name: (dtype, shape)}."""
    header, end = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape) in tensors.items():
        size = ELEMENT_BYTES[dtype]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header)
    text += " " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text.encode() + bytes(i % 7 for i in range(end))


def make_configs():
    for name in ("quickstart", "tiny-llama", "olmo-1b-coat"):
        seed("config", name, (ROOT / "configs" / f"{name}.json").read_bytes())
    tiny = {"model": {"vocab_size": 8, "d_model": 4, "num_layers": 1, "num_heads": 2, "d_ffn": 6}}
    seed("config", "tiny", tiny)
    seed("config", "comments", '// a run\n{"data": {"train": ["a.npy", "b/*.npy"], "weights": [1, 2.5]}, /* x */ '
         '"optimizer": {"lr": 1e-3, "schedule": {"kind": "wsd", "decay_steps": 3, "warmup_steps": 2}}}')
    seed("overrides", "values", "optimizer.lr=1e-3\ndata.train=[\"a\",\"b\"]\ntraining.steps=100\n"
         "model.norm=rmsnorm\ncheckpoint.folder=runs/x\ndata.shuffle=false\nprecision.recipe=coat\n")
    seed("overrides", "wrong", "optimizer.lrr=1\nmodel=3\n=\ndata.weights=[1,-2]\n")
    seed("json_text", "values", '{"a": [1, -2, 3.5e-7, true, null, "\\u00e9\\n"], "b": {"c": {}}}')
    seed("json_text", "comments", '\ufeff// first\n{"a": /* in between */ 1}\n')
    seed("json_text", "deep", "[" * 40 + "]" * 40)


def make_checkpoints():
    whole = {"w": ("F32", [2, 3]), "b": ("BF16", [4]), "codes": ("F8_E4M3", [5]), "none": ("U8", [0, 2])}
    seed("safetensors", "formats", safetensors(whole, {"format": "pt"}))
    seed("safetensors", "empty", safetensors({}))
    seed("safetensors", "numbers", safetensors({"i": ("I32", []), "u": ("U16", [1, 1, 3]), "h": ("F16", [2])}))
    seed("checkpoint", "whole", safetensors(whole))
    first, second = {"w": {"shape": [2, 3], "begin": 0}}, {"w": {"shape": [2, 3], "begin": 4}}
    pieces = [safetensors({"w": ("F32", [4]), "b": ("U8", [3])}, {"parka_pieces": json.dumps(first)}),
              safetensors({"w": ("F32", [2])}, {"parka_pieces": json.dumps(second)})]
    seed("checkpoint", "pieces", DIVIDER.join(pieces))
    left, right = ({"w": {"shape": [2, 3], "rows": [0, 2], "columns": columns}} for columns in ([0, 1], [1, 3]))
    boxes = [safetensors({"w": ("F32", [2])}, {"parka_pieces": json.dumps(left)}),
             safetensors({"w": ("F32", [4])}, {"parka_pieces": json.dumps(right)})]
    seed("checkpoint", "boxes", DIVIDER.join(boxes))
    seed("checkpoint", "three", DIVIDER.join([safetensors({"a": ("U8", [3])}), safetensors({"b": ("BF16", [2])}),
                                              safetensors({"c": ("F32", [1])})]))


def make_manifests():
    file = {"name": "shard_0.safetensors", "bytes": 64, "xxh3_128": "0" * 32}
    one = {"format": "parka-checkpoint", "version": 1, "step": 100, "state": {"tokens": 7}, "files": [file],
           "tensors": 3, "complete": True}
    of_rank = [dict(file, name=f"rank_{rank:04}_shard_0.safetensors") for rank in (0, 2)]
    several = dict(one, version=2, ranks=3, attempt="a-1", files=of_rank)
    for name, manifest in (("one", one), ("several", several)):
        seed("manifest", name, json.dumps(manifest)[:-1])  # the target closes it
    seed("manifest", "files", of_rank)
    config = {"model": {"vocab_size": 8, "d_model": 4, "num_layers": 1, "num_heads": 2, "d_ffn": 6}}
    files = [{"name": "a.npy", "bytes": 1, "fingerprint": 18446744073709551615, "checksum": "c"}]
    run = {"applied_steps": 3, "tokens": 96, "config_hash": "0" * 32, "config": config,
           "data": {"epoch": 1, "consumed": 12, "fingerprint": 18446744073709551615, "files": files}}
    seed("checkpoint_state", "run", run)
    started = dict(config, checkpoint={"init_from": "no/such/model"})
    seed("checkpoint_state", "started", dict(run, config=started))
    seed("checkpoint_state", "imported", {"config": config, "max_positions": 4096, "huggingface_layout": layout()})
    seed("checkpoint_state", "formats", {"config": config, "huggingface_layout": {"model.norm.weight": "BF16"}})
    seed("checkpoint_state", "without_layout", {"config": config, "huggingface_layout": None})


LAYER = "model.layers.0."
HUGGING_FACE = {
    "model.embed_tokens.weight": [8, 4], LAYER + "self_attn.q_proj.weight": [4, 4],
    LAYER + "self_attn.k_proj.weight": [4, 4], LAYER + "self_attn.v_proj.weight": [4, 4],
    LAYER + "self_attn.o_proj.weight": [4, 4], LAYER + "mlp.gate_proj.weight": [6, 4],
    LAYER + "mlp.up_proj.weight": [6, 4], LAYER + "mlp.down_proj.weight": [4, 6],
    LAYER + "input_layernorm.weight": [4], LAYER + "post_attention_layernorm.weight": [4], "model.norm.weight": [4]}


def header_of(file):
    return file[8:8 + struct.unpack("<Q", file[:8])[0]].decode()


def layout():
    file = safetensors({"model.norm.weight": ("BF16", [4]), "lm_head.weight": ("F32", [2, 4])})
    return {"files": [{"name": "model.safetensors", "header": header_of(file)}], "index": ""}


def make_hugging_face():
    for name in ("llama3_gqa", "olmo_tied", "mistral_window", "llama_yarn", "qwen3_moe_gqa", "dots1_groups"):
        path = ROOT / "tests" / "fixtures" / "huggingface" / name / "config.json"
        seed("huggingface_config", name, path.read_bytes())
    for name in ("clip_llama", "siglip_qwen2"):
        seed("huggingface_config", name, (ROOT / f"tests/fixtures/llava/{name}/config.json").read_bytes())
    adapters = (ROOT / "tests/fixtures/peft/adapter_config.json").read_bytes()
    seed("peft_config", "peft", adapters)
    seed("peft_config", "all_linear", {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": False})
    old = json.loads((ROOT / "tests/fixtures/huggingface/llama3_gqa/config.json").read_text())
    rope = old.pop("rope_parameters", None) or old.get("rope_scaling") or {}
    old["rope_theta"] = rope.pop("rope_theta", 10000.0)
    seed("huggingface_config", "old", dict(old, rope_scaling=rope, torch_dtype="float16", head_dim=None))
    whole = {name: ("F32" if len(shape) == 1 else "BF16", shape) for name, shape in HUGGING_FACE.items()}
    seed("huggingface_weights", "one", DIVIDER + safetensors(whole, {"format": "pt"}))
    quantized = (ROOT / "tests/fixtures/bitsandbytes/nf4/model.safetensors").read_bytes()
    seed("huggingface_weights", "bitsandbytes", DIVIDER + quantized)
    names, files, index = list(whole), [], {}
    for number, part in ((1, names[:5]), (2, names[5:])):
        files.append(safetensors({name: whole[name] for name in part}))
        index.update({name: f"model-0000{number}-of-00002.safetensors" for name in part})
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index}).encode()
    seed("huggingface_weights", "two", DIVIDER.join([text, *files]))


def make_token_files():
    ids = [5, 3, 7, 999, 3, 0, 1, 2, 3, 4, 5, 6]
    narrow, wide = struct.pack(f"<{len(ids)}H", *ids), struct.pack(f"<{len(ids)}I", *ids)
    mask = bytes([3, 1, 0, 1, 2, 1, 1, 1, 3, 1, 0, 0])
    lengths, marks = [5, 4, 3], [0, 2, 3]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(marks))
    index += struct.pack("<3i", *lengths) + struct.pack("<3q", 0, 10, 18) + struct.pack("<3q", *marks)
    llm_c = [struct.pack("<3i", 20240520, 1, len(ids)) + bytes(1012) + narrow,
             struct.pack("<3i", 20240801, 7, len(ids)) + bytes(1012) + wide]
    for name, parts in (("raw16", [b"npy 16", narrow]), ("raw32", [b"npy 32", wide]),
                        ("mask", [b"npy 16", narrow, b"", mask]), ("megatron", [b"bin 16", narrow, index]),
                        ("index", [b"idx 16", narrow, index, mask]), ("llm_c16", [b"bin 16", llm_c[0]]),
                        ("llm_c32", [b"bin 32", llm_c[1], b"", mask])):
        seed("token_file", name, DIVIDER.join(parts))
    for name, source in (("name", "a.npy"), ("pattern", "*.npy"), ("set", "[ab].*"), ("folder", "more/?.npy"),
                         ("literal", "[x].npy"), ("below_a_file", "a.npy/*"), ("long", "x" * 300 + "*")):
        seed("token_source", name, source)


def make_image_files():
    tokens = struct.pack("<8H", 1, 9, 9, 2, 9, 3, 4, 5)
    pixels = b"PARKAPIX" + struct.pack("<4IQ", 1, 3, 1, 2, 2) + bytes(32) + bytes(range(12))
    header = b"PARKAIMG" + struct.pack("<6IQ", 1, 9, 2, 2, 2, 0, 2) + bytes(24)
    square = b"PARKAPIX" + struct.pack("<4IQ", 1, 3, 2, 2, 1) + bytes(32) + bytes(range(12))
    checksum = 0x5ace6a511c10894b  # XXH3-64 of the pixels
    references = struct.pack("<QQ4I", 1, checksum, 0, 0, 2, 0) + struct.pack("<QQ4I", 4, checksum, 0, 0, 1, 0)
    seed("image_files", "two", DIVIDER.join([tokens, header + references, square]))
    seed("image_files", "wide", DIVIDER.join([tokens, header + references, pixels]))
    none = b"PARKAIMG" + struct.pack("<6IQ", 1, 10, 2, 2, 2, 0, 0) + bytes(24)
    seed("image_files", "none", DIVIDER.join([tokens, none]))


def make_evaluation():
    head = {"kind": "parka requests", "version": 1, "task": "arc", "metric": "acc"}
    choice = {"continuation": [4, 5], "characters": 6, "bytes": 7}
    document = {"context": [1, 2, 999], "choices": [choice, dict(choice, context=[9])], "label": 1}
    lines = {"shared": [head, document], "pmi": [dict(head, metric="pmi_dc"), dict(document, domain=[8])]}
    for name, parts in lines.items():
        seed("requests", name, "".join(json.dumps(part) + "\n" for part in parts))
    seed("metrics_log", "run", '{"step":4,"loss":2.5}\n{"step":5,"loss":null}\n{"step":6}\n{"event":"saved"}\n{"ste')


def make_measurements():
    gemm = {"gemm": "8 x 16 x 32 bf16 NN bf16", "algorithm": "0a" * 64, "microseconds": 12.5,
            "default_microseconds": 13}
    seed("gemm_tuning", "cpu", {"gpu": "CPU", "cublaslt": "", "gemms": [gemm, gemm]})
    seed("gemm_tuning", "other", {"gpu": "NVIDIA H200", "cublaslt": "13.1.0", "gemms": []})
    ops = [{"section": section, "op": op, "shape": "", "runs": runs, "seconds": 0.25, "bytes": 1e6, "flop": 0}
           for section, op, runs in (("embedding", "embedding_forward", 4), ("embedding", "embedding_backward", 4),
                                     ("block forward", "gemm", 16), ("block backward", "gemm", 32),
                                     ("head", "gemm", 12), ("optimizer", "adamw_step", 10),
                                     ("optimizer", "sum_of_squares", 1), ("optimizer", "quantize", 8))]
    config = {"model": {"vocab_size": 512, "d_model": 128, "num_layers": 2, "num_heads": 4, "d_ffn": 256},
              "precision": {"recipe": "parka"}, "optimizer": {"gradient": "bf16"},
              "data": {"train": ["train.npy"], "sequence_length": 64},
              "training": {"global_batch_size": 8, "micro_batch_size": 2}}
    measurement = {"device": "NVIDIA H200", "ranks": 1, "step_seconds": [0.9, 0.8, 5.0], "copy_bandwidth": 1e9,
                   "ops": ops, "config": config}
    seed("step_measurement", "one", measurement)
    seed("step_measurement", "four", dict(measurement, ranks=4))


def make_arguments():
    for name, text in (("tokens", "1,2,-3,2147483647"), ("size", "5.5GiB"), ("bytes", "300000"),
                       ("set", "c4=data/c4.npy"), ("number", "-1.5e-3"), ("step", "step_00000100.tmp"),
                       ("dotted", "--optimizer.lr=1e-3"), ("gigabytes", "24 GiB")):
        seed("arguments", name, text)


make_configs()
make_checkpoints()
make_manifests()
make_hugging_face()
make_token_files()
make_image_files()
make_evaluation()
make_measurements()
make_arguments()
