"""The trainings that hash_runs.py hashes: their configs, and the token, mask and task files that they read. A recorded hash
holds only as long as its case here stays as it is, so a case is added under a new name rather than changed."""
import array
import copy
import dataclasses
import json
import os
import random

STEPS = 8
SEQUENCE = 24
LONG_SEQUENCE = 168
VOCAB = {"olmo": 75, "llama": 96}
FAMILIES = {
    "olmo": {"vocab_size": VOCAB["olmo"], "d_model": 48, "num_layers": 3, "num_heads": 3, "d_ffn": 80},
    "llama": {"vocab_size": VOCAB["llama"], "d_model": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 112,
              "norm": "rmsnorm", "norm_eps": 1e-6, "tie_embeddings": False, "init": "normal",
              "rope_scaling": {"kind": "llama3", "original_length": 16}},
}
# Recipes as they are, and optimizer forms that no recipe has.
RECIPES = {
    **{recipe: (recipe, {}) for recipe in
       ("fp32", "bf16", "fp8_linear", "fp8_block", "coat_activation", "coat_optimizer", "coat", "parka")},
    "bf16_sr": ("bf16", {"master": "bf16_sr", "states": "bf16"}),
    "fp8_states": ("bf16", {"states": "fp8"}),
}
# Ranks, ZeRO stage, shard size.
SHARDINGS = ((1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 3, 0), (3, 1, 0), (3, 3, 0),
             (4, 0, 0), (4, 1, 0), (4, 2, 0), (4, 3, 0), (4, 1, 2), (4, 2, 2), (4, 3, 2))
MASKED = {"data": {"weights": [0.7, 0.3], "loss_mask": True, "documents": "separate"}}


@dataclasses.dataclass
class Part:
    """One start of `parka train` in the run folder of a case: the first begins the run, others resume it."""
    ranks: int = 1
    changes: dict = dataclasses.field(default_factory=dict)  # sections of the config of which keys are added or replaced


@dataclasses.dataclass
class Case:
    name: str
    config: dict
    parts: list = dataclasses.field(default_factory=lambda: [Part()])
    threads: int = 1
    same_as: str = ""  # another case, which has the same bits
    source: dict = dataclasses.field(default_factory=dict)  # a config that is trained first, in the folder `source`
    generates: bool = False  # also evaluates and generates from the last checkpoint

    def ranks(self):
        return max(part.ranks for part in self.parts)


def merged(config, changes):
    """A copy of `config` with the keys of `changes`, section by section."""
    result = copy.deepcopy(config)
    for section, keys in changes.items():
        result[section] = {**result.get(section, {}), **keys}
    if result.get("data", {}).get("loss_mask"):  # masks lie beside the files of these cases alone
        result = json.loads(json.dumps(result).replace("../data/", "../masked/"))
    return result


def base_config(family, recipe):
    """An epoch is 7 steps, each of two micro-batches. The folder in which it runs is one beside `data`."""
    recipe_name, optimizer = RECIPES[recipe]
    return {
        "device": {"kind": "cpu"},
        "model": FAMILIES[family],
        "precision": {"recipe": recipe_name},
        "optimizer": {"lr": 3e-3, "schedule": {"kind": "cosine", "warmup_steps": 5, "total_steps": STEPS}, **optimizer},
        "data": {"train": [f"../data/{family}_a.npy", f"../data/{family}_b.npy"], "eval": [f"../data/{family}_held_out.npy"],
                 "sequence_length": SEQUENCE},
        "training": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "eval_interval": 4},
        "checkpoint": {"folder": "run", "interval": 4, "keep": 0},
        "evaluation": {"sets": [f"a=../data/copies/{family}_a.npy", f"held_out=../data/{family}_held_out.npy"],
                       "tasks": ["../data/task.jsonl"]},
    }


def of(name, family, recipe, changes=None, **fields):
    """A case of one start on one rank, unless `fields` say more."""
    return Case(f"{family}.{recipe}{name}", merged(base_config(family, recipe), changes or {}), **fields)


def recipe_cases():
    return [of("", family, recipe) for family in FAMILIES for recipe in RECIPES]


def sharded(family, recipe, sharding, name="", changes=None, **fields):
    """A case of a batch that 1, 2, 3 and 4 ranks can divide; an epoch is 2 steps."""
    ranks, stage, shard_size = sharding
    config = merged(base_config(family, recipe), {
        "data": {"sequence_length": 32}, "training": {"global_batch_size": 12, "micro_batch_size": 1},
        "distributed": {"zero_stage": stage, "shard_size": shard_size}})
    name = f".ranks{ranks}.zero{stage}" + (f".shard{shard_size}" if shard_size else "") + name
    fields.setdefault("parts", [Part(ranks)])
    return Case(f"{family}.{recipe}{name}", merged(config, changes or {}), **fields)


def sharded_cases():
    kinds = (("olmo", "parka"), ("llama", "parka"), ("llama", "bf16"), ("olmo", "coat"))
    cases = [sharded(family, recipe, sharding) for family, recipe in kinds for sharding in SHARDINGS]
    stage3 = (4, 3, 0)
    cases += [sharded("olmo", recipe, stage3) for recipe in ("fp32", "fp8_block", "bf16_sr", "fp8_states")]
    for copies in ("both", "rows", "none"):
        cases.append(sharded("llama", "parka", stage3, f".weight_copies_{copies}", {"precision": {"weight_copies": copies}},
                             same_as="llama.parka.ranks4.zero3"))
    mixed = {"precision": {"unquantized": ["blocks.0.*", "*.down", "head"]}}
    cases.append(sharded("llama", "parka", (4, 2, 0), ".unquantized", mixed))
    for name, keys in (("", {}), (".weight_copies_both", {"weight_copies": "both"}), (".recompute", {"recompute": "block"})):
        cases.append(sharded("llama", "parka", stage3, f".unquantized{name}", merged(mixed, {"precision": keys}),
                             same_as="llama.parka.ranks4.zero2.unquantized"))
    forward = {"precision": {"unquantized": ["blocks.0.*.forward", "*.down.forward"]}}
    for recipe, stage in (("parka", 1), ("coat", 2)):
        cases.append(sharded("llama", recipe, (2, stage, 0), ".forward", forward))
        cases.append(sharded("llama", recipe, (2, stage, 0), ".forward.saving", merged(forward, {"precision": {
            "recompute": "block", "offload_blocks": 1, "weight_copies": "none"}}), same_as=f"llama.{recipe}.ranks2.zero{stage}.forward"))
    saving = {"precision": {"recompute": "block", "offload_blocks": 1}}
    cases.append(sharded("llama", "parka", stage3, ".recompute.offload", saving, same_as="llama.parka.ranks4.zero3"))
    cases.append(sharded("llama", "parka", (4, 2, 2), ".telemetry", {"telemetry": {"interval": 3}}))
    cases.append(sharded("olmo", "parka", (2, 2, 0), ".masks", MASKED))
    return cases


def resumed_cases():
    def stops_at(step):
        return {"training": {"steps": step}}

    cases = [of(".resumed", family, recipe, parts=[Part(1, stops_at(4)), Part()], same_as=f"{family}.{recipe}")
             for family, recipe in (("olmo", "parka"), ("llama", "parka"), ("llama", "bf16_sr"), ("olmo", "coat"))]
    cases.append(of(".masks.resumed", "olmo", "parka", MASKED, parts=[Part(1, stops_at(4)), Part()],
                    same_as="olmo.parka.masks"))
    cases.append(sharded("olmo", "coat", (2, 3, 0), ".resumed", parts=[Part(2, stops_at(4)), Part(2)],
                         same_as="olmo.coat.ranks2.zero3"))
    moves = ((4, 3, 0, 2), (2, 1, 0, 3), (4, 3, 2, 5), (1, 0, 0, 6), (3, 2, 0, STEPS))
    parts = [Part(ranks, merged(stops_at(step), {"distributed": {"zero_stage": stage, "shard_size": size}}))
             for ranks, stage, size, step in moves]
    cases += [sharded("llama", recipe, (4, 3, 0), ".moved", {"checkpoint": {"interval": 2}}, parts=parts)
              for recipe in ("parka", "bf16")]
    return cases


def option_cases():
    same = [
        ("recompute", {"precision": {"recompute": "block"}}),
        ("offload", {"precision": {"offload_blocks": 1}}),
        ("recompute_offload", {"precision": {"recompute": "block", "offload_blocks": 1}}),
        ("weight_copies_both", {"precision": {"weight_copies": "both"}}),
        ("weight_copies_rows", {"precision": {"weight_copies": "rows"}}),
        ("weight_copies_none", {"precision": {"weight_copies": "none"}}),
        ("kept_for_backward", {"precision": {"save_norm_output": True, "save_product": True}}),
        ("saves_in_step", {"checkpoint": {"async": False}}),
    ]
    cases = [of(f".{name}", family, "parka", changes, same_as=f"{family}.parka")
             for family in FAMILIES for name, changes in same]
    cases += [of(".unquantized", family, "fp8_linear", {"precision": {"unquantized": ["*"]}}, same_as=f"{family}.bf16")
              for family in FAMILIES]
    cases += [of(".threads2", family, "parka", threads=2, same_as=f"{family}.parka") for family in FAMILIES]
    other = [
        ("telemetry", {"telemetry": {"interval": 3}}),
        ("masks", MASKED),
        ("document_end", {"data": {"documents": "separate", "document_end": 3}}),
        ("micro1", {"training": {"micro_batch_size": 1}, "data": {"sequence_length": 32}}),
        ("micro4", {"training": {"micro_batch_size": 4}}),
        ("loss", {"training": {"z_loss": 1e-3, "logits_chunk_tokens": 32, "eval_sequences": 3, "seed": 7}}),
        ("optimizer", {"optimizer": {"clip_norm": 0.05, "clip_warmup_steps": 3, "decay_embeddings": True, "gradient": "bf16",
                                     "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_steps": 3}}}),
        ("no_clipping", {"optimizer": {"clip_norm": 0, "schedule": {"kind": "linear"}}, "data": {"shuffle": False}}),
        ("formats", {"precision": {"backward_format": "e4m3", "eval": "bf16"}}),
        ("save_silu", {"precision": {"save_silu": True}}),
    ]
    cases += [of(f".{name}", family, "parka", changes) for family in FAMILIES for name, changes in other]
    cases.append(of(".untied", "olmo", "parka", {"model": {"tie_embeddings": False}}))
    cases.append(of(".tied", "llama", "parka", {"model": {"tie_embeddings": True}}))
    cases.append(of(".head_dim", "llama", "parka", {"model": {"head_dim": 32, "d_ffn": 128},
                                                    "precision": {"group_size": 32}}))
    cases.append(of(".masks", "llama", "fp32", MASKED))
    return cases


def wide_case(family, recipe, model):
    long, copy = f"../data/{family}_long.npy", f"../data/copies/{family}_long.npy"
    return of(".wide", family, recipe, {
        "model": {"d_model": 192, "num_layers": 2, "d_ffn": 368, **model},
        "data": {"train": [long], "eval": [copy], "sequence_length": LONG_SEQUENCE},
        "training": {"steps": 4, "micro_batch_size": 4},
        "evaluation": {"sets": [f"long={copy}"]},
    })


def wide_cases():
    """Products of several tiles, ragged ones too, and weight gradients of sums that Eigen divides even with AVX-512."""
    olmo, llama = {"vocab_size": 333}, {"vocab_size": 300, "num_heads": 6}
    kinds = (("olmo", "parka", olmo), ("llama", "parka", llama), ("llama", "bf16", llama), ("olmo", "fp32", olmo),
             ("llama", "fp8_block", llama), ("olmo", "coat", olmo))
    return [wide_case(*kind) for kind in kinds]


def weight_cases():
    """Runs that begin with another run's weights, and what is done with the weights of a run."""
    begun = {"checkpoint": {"init_from": "source"}}
    cases = [of(f".from_{source}", "llama", recipe, begun, source=base_config("llama", source))
             for source, recipe in (("bf16", "parka"), ("parka", "fp32"))]
    cases += [of(".generate", family, recipe, generates=True)
              for family in FAMILIES for recipe in ("fp32", "bf16", "fp8_block", "coat", "parka")]
    return cases


def muon_cases():
    muon = {"optimizer": {"kind": "muon"}}
    in_host_memory = {"optimizer": {"kind": "muon", "offload": True}}
    stops = [Part(1, {"training": {"steps": 4}}), Part()]
    cases = [of(".muon", family, recipe, muon) for family in FAMILIES for recipe in ("fp32", "parka")]
    cases += [
        of(".muon.polar_express", "llama", "bf16", {"optimizer": {"kind": "muon", "orthogonalization": "polar_express"}}),
        of(".muon.offload", "llama", "parka", in_host_memory, same_as="llama.parka.muon"),
        of(".muon.resumed", "llama", "parka", muon, parts=stops, same_as="llama.parka.muon"),
    ]
    cases += [sharded("llama", "parka", sharding, ".muon", muon) for sharding in ((2, 1, 0), (2, 3, 0), (4, 1, 0), (4, 3, 0), (4, 3, 2))]
    cases.append(sharded("llama", "parka", (4, 3, 0), ".muon.offload", in_host_memory, same_as="llama.parka.ranks4.zero3.muon"))
    cases.append(sharded("llama", "parka", (2, 3, 0), ".muon.resumed", muon, same_as="llama.parka.ranks2.zero3.muon",
                         parts=[Part(2, {"training": {"steps": 4}}), Part(2)]))
    return cases


# Eight experts of which each token has two; the other also has what DeepSeek-V3 adds.
MOE = {"model": {"d_ffn": 32, "moe": {"num_experts": 8, "experts_per_token": 2}},
       "training": {"balance_loss": 0.01, "router_z_loss": 0.001}}
SHARED_MOE = merged(MOE, {"model": {"moe": {**MOE["model"]["moe"], "score": "sigmoid", "normalize_weights": True, "weight_scaling": 2.5, "groups": 4,
                                            "groups_kept": 2, "correction_bias": True, "shared_width": 16, "dense_layers": 1,
                                            "dense_width": 48}},
                          "training": {"balance_form": "pooled", "router_bias_rate": 0.01}})


def moe_cases():
    same = [("recompute", {"precision": {"recompute": "block"}}), ("offload", {"precision": {"offload_blocks": 1}}),
            ("kept_for_backward", {"precision": {"save_norm_output": True, "save_product": True}}),
            *((f"weight_copies_{copies}", {"precision": {"weight_copies": copies}}) for copies in ("both", "rows", "none"))]
    stops = [Part(1, {"training": {"steps": 4}}), Part()]
    cases = [of(f".{name}", "llama", recipe, moe) for recipe in ("fp32", "bf16", "fp8_linear", "coat", "parka")
             for name, moe in (("moe", MOE), ("shared_moe", SHARED_MOE))]
    cases += [of(f".{kind}.{name}", "llama", "parka", merged(moe, changes), same_as=f"llama.parka.{kind}")
              for kind, moe in (("moe", MOE), ("shared_moe", SHARED_MOE)) for name, changes in same]
    cases += [of(".moe.threads2", "llama", "parka", MOE, threads=2, same_as="llama.parka.moe"),
              of(".moe.resumed", "llama", "parka", MOE, parts=stops, same_as="llama.parka.moe"),
              of(".moe.telemetry", "llama", "parka", merged(MOE, {"telemetry": {"interval": 3}})),
              of(".moe.masks", "llama", "parka", merged(MOE, MASKED)),
              of(".moe.muon", "llama", "parka", merged(MOE, {"optimizer": {"kind": "muon"}}), generates=True)]
    cases += [sharded("llama", "parka", sharding, ".moe", MOE) for sharding in ((2, 0, 0), (2, 1, 0), (4, 2, 0), (4, 2, 2))]
    cases += [sharded("llama", recipe, sharding, ".moe", MOE)
              for recipe in ("bf16", "parka") for sharding in ((2, 3, 0), (3, 3, 0), (4, 3, 2))]
    divided = {"distributed": {"expert_parallel": 2}, "evaluation": {"tasks": []}}
    cases += [sharded("llama", "parka", sharding, f".{name}.divided", merged(moe, divided))
              for sharding in ((2, 1, 0), (4, 2, 0)) for name, moe in (("moe", MOE), ("shared_moe", SHARED_MOE))]
    cases.append(sharded("llama", "parka", (2, 1, 0), ".moe.divided.recompute", merged(MOE, {**divided, "precision": {"recompute": "block"}}),
                         same_as="llama.parka.ranks2.zero1.moe.divided"))
    cases.append(sharded("llama", "parka", (2, 2, 0), ".shared_moe.resumed", SHARED_MOE,
                         parts=[Part(2, {"training": {"steps": 4}}), Part(2)]))
    return cases


def all_cases():
    return [*recipe_cases(), *option_cases(), *wide_cases(), *weight_cases(), *sharded_cases(), *resumed_cases(), *muon_cases(),
            *moe_cases()]


def write_tokens(path, count, vocab, seed):
    rng = random.Random(seed)
    with open(path, "wb") as file:
        file.write(array.array("H", (int(rng.random() * vocab) for _ in range(count))).tobytes())


def write_marks(path, count, seed):
    """Documents of all lengths, of which a beginning is no target."""
    rng = random.Random(seed)
    marks = bytearray()
    while len(marks) < count:
        length = (1, 2, 5, 9, 30)[int(rng.random() * 5)]
        prompt = int(rng.random() * (length + 1))
        document = bytearray(b"\0" * prompt + b"\1" * (length - prompt))
        document[0] |= 2
        marks += document
    with open(path, "wb") as file:
        file.write(marks[:count])


def write_task(path):
    """Ten queries: neither 3 ranks nor 4 have equally many."""
    lines = [{"kind": "parka requests", "version": 1, "task": "made_up", "metric": "len_norm"}]
    for i in range(5):
        choices = [{"continuation": [i + j + 1, 7, 9][: j + 2], "characters": 3 + j, "bytes": 4 + j} for j in range(2)]
        lines.append({"label": i % 2, "context": list(range(3 * i + 1)), "choices": choices})
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_data(folder):
    """Also the same files with masks, in a folder beside it. A file is evaluated on as a copy where it is trained on, with
    one token more: an equal one would be refused."""
    write_files(folder, with_marks=False)
    write_files(os.path.join(os.path.dirname(folder), "masked"), with_marks=True)


def write_files(folder, with_marks):
    os.makedirs(os.path.join(folder, "copies"))
    for family, vocab in VOCAB.items():
        for seed, (name, count) in enumerate((("a", 17 * SEQUENCE + 5), ("b", 14 * SEQUENCE), ("held_out", 6 * SEQUENCE),
                                              ("long", 12 * LONG_SEQUENCE + 9))):
            for place, more in (("", 0), ("copies", 1)):
                path = os.path.join(folder, place, f"{family}_{name}.npy")
                write_tokens(path, count + more, vocab, seed)
                if with_marks:
                    write_marks(path + ".mask", count + more, seed + 10)
    write_task(os.path.join(folder, "task.jsonl"))
