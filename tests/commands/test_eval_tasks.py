"""scripts/prepare_eval.py and `parka eval` on tasks and named sets, against the rules of OLMo's evaluation written
down once more over a forward pass in numpy."""
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import types
import unittest

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

try:
    import tokenizers
except ImportError:
    tokenizers = None

from numpy_model import NumpyModel
from parka_runs import RunFolder, metrics, parka, tiny_config

PREPARE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "prepare_eval.py")
CONTEXT = 96  # tokens; some prompts are longer

# Of each task its metric, and documents with what they have to become: contexts (one or one per choice), choices,
# contexts of pmi_dc, label.
HUGGING_FACE_ARC = {"id": "a", "question": "Which is hot?", "choices": {"text": ["ice", "the sun", "snow"], "label": ["A", "B", "C"]}}
TASKS = {
    "copa": ("acc", [
        ({"premise": "The man fell asleep. ", "choice1": "He was tired.", "choice2": "It was loud.", "question": "cause", "label": 0},
         ["The man fell asleep because"], [" he was tired.", " it was loud."], ["because"], 0),
        ({"premise": "It rained.", "choice1": "She danced.", "choice2": "The street got wet.", "question": "effect", "label": 1},
         ["It rained therefore"], [" she danced.", " the street got wet."], ["therefore"], 1)]),
    "arc_easy": ("acc", [
        ({**HUGGING_FACE_ARC, "answerKey": "B"},
         ["Question: Which is hot?\nAnswer:"], [" ice", " the sun", " snow"], ["Answer:"], 1),
        ({**HUGGING_FACE_ARC, "answerKey": "3"},
         ["Question: Which is hot?\nAnswer:"], [" ice", " the sun", " snow"], ["Answer:"], 2),
        ({"question": {"stem": "What?", "choices": [{"text": "b", "label": "A"}, {"text": "cé", "label": "B"}]}, "answerKey": "A"},
         ["Question: What?\nAnswer:"], [" b", " cé"], ["Answer:"], 0)]),
    "sciq": ("acc", [
        ({"question": "Who?", "distractor1": "Ann", "distractor2": "Bo", "distractor3": "Cy", "correct_answer": "Di", "support": " Di did. "},
         ["Di did.\nQuestion: Who?\nAnswer:"], [" Ann", " Bo", " Cy", " Di"], ["Answer:"], 3),
        ({"question": "What is it?", "distractor1": "x", "distractor2": "y", "distractor3": "z", "correct_answer": "w",
          "support": "A long text that does not fit into the context of the model, so that it is cut off on the left. " * 2},
         [("A long text that does not fit into the context of the model, so that it is cut off on the left. " * 2).strip()
          + "\nQuestion: What is it?\nAnswer:"], [" x", " y", " z", " w"], ["Answer:"], 3)]),
    "hellaswag": ("len_norm", [
        ({"activity_label": "Baking", "ctx_a": "[header] A cook [title] stirs.  She", "ctx_b": "then PAUSES", "label": "2",
          "endings": ["[step] runs.", "eats the  bowl [substeps] whole", "adds sugar, naïvely."]},
         ["Baking: A cook. stirs. She Then pauses"], [" " + " runs.", " eats the bowl whole", " adds sugar, naïvely."],
         ["Then pauses"], 2),
        ({"activity_label": "Rest", "ctx_a": "He sits", "ctx_b": "", "label": 0, "endings": ["down.", "up."]},
         ["Rest: He sits"], [" down.", " up."], ["sits"], 0)]),
    "piqa": ("len_norm", [
        ({"goal": "open a jar", "sol1": "turn the lid", "sol2": "turn the table over and over", "label": 0},
         ["Question: open a jar\nAnswer:"], [" turn the lid", " turn the table over and over"], ["Answer:"], 0),
        ({"goal": "boil", "sol1": "freeze", "sol2": "heat", "label": 1},
         ["Question: boil\nAnswer:"], [" freeze", " heat"], ["Answer:"], 1)]),
    "winogrande": ("acc", [
        ({"sentence": "Ann saw Bo when _ turned around.", "option1": "Ann", "option2": "Bo", "answer": "2"},
         ["Ann saw Bo when Ann", "Ann saw Bo when Bo"], [" turned around."] * 2, ["Ann", "Bo"], 1)]),
    "openbook_qa": ("len_norm", [
        ({"question_stem": "The sun is", "choices": {"text": ["a star", "cold", "blue", "a lamp"], "label": ["A", "B", "C", "D"]},
          "answerKey": "A "},
         ["The sun is"], [" a star", " cold", " blue", " a lamp"], ["is"], 0),
        ({"question": {"stem": "Fish live in", "choices": [{"text": "trees", "label": "A"}, {"text": "water", "label": "B"}]}, "answerKey": "B"},
         ["Fish live in"], [" trees", " water"], ["in"], 1)]),
    "text_choice": ("acc", [
        ({"context": "int x = 1;", "choices": ["\nx += 2;", "\nreturn y;"], "answer": 0},
         ["int x = 1;"], ["\nx += 2;", "\nreturn y;"], ["\n"], 0)]),
    "boolq": ("acc", [
        ({"passage": "Ice is cold.", "question": "is ice cold", "answer": True},
         ["Ice is cold.\nQuestion: is ice cold?\nAnswer:"], [" yes", " no"], ["Answer:"], 0),
        ({"passage": "Ice.", "question": "is ice hot", "label": 0},
         ["Ice.\nQuestion: is ice hot?\nAnswer:"], [" yes", " no"], ["Answer:"], 1)]),
}


def prepare(*arguments):
    return subprocess.run([sys.executable, PREPARE, *arguments], capture_output=True, text=True, timeout=120)


def log_likelihood(model, context, continuation):
    """By OLMo's rules: the query is the context and all of the continuation but its last token, cut on the left."""
    context, continuation = list(context.encode()), list(continuation.encode())
    query = (context + continuation[:-1])[-CONTEXT:]
    start = len(query) - len(continuation) + 1
    rows = model.log_probabilities(query)[start - 1 : start + len(continuation) - 1]
    return sum(row[token] for row, token in zip(rows, continuation))


def choice_by(metric, log_likelihoods, domain_log_likelihoods, choices):
    if metric == "len_norm":
        values = [x / (len(choice) - 1) for x, choice in zip(log_likelihoods, choices)]
    elif metric == "pmi_dc":
        values = [x - d for x, d in zip(log_likelihoods, domain_log_likelihoods)]
    else:
        values = log_likelihoods
    return int(np.argmax(values))


class Tasks(RunFolder):
    def setUp(self):
        super().setUp()
        with open(os.path.abspath(__file__), "rb") as file:
            text = file.read()
        for name, part in (("a.npy", text[:9000]), ("b.npy", text[3000:6000]), ("held_out.npy", text[9000:11000])):
            np.frombuffer(part, np.uint8).astype("<u2").tofile(self.path(name))
        self.config = tiny_config(self.folder, "fp32", steps=6, lr=1e-2)
        self.config["model"].update(vocab_size=272, num_heads=2, num_kv_heads=1, norm="rmsnorm", tie_embeddings=False)
        self.config["data"]["sequence_length"] = CONTEXT
        self.config["training"]["eval_interval"] = 3

    def write_documents(self, task):
        path = self.path(task + ".jsonl")
        with open(path, "w", encoding="utf-8") as file:
            for document, *_ in TASKS[task][1]:
                file.write(json.dumps(document) + "\n")
        return path

    def prepare(self, task, *options, name=None):
        out = self.path((name or task) + ".requests.jsonl")
        result = prepare("--task", task, self.write_documents(task), "--out", out, *options)
        self.assert_exit(result, 0)
        return out

    def evaluate(self, *arguments):
        result = parka("eval", self.path("run"), *arguments, "--json")
        self.assert_exit(result, 0)
        return json.loads(result.stdout)

    def test_requests_are_as_olmo_has_them(self):
        for task, (metric, documents) in TASKS.items():
            for pmi in (False, True):
                with self.subTest(task=task, pmi=pmi):
                    path = self.prepare(task, *(["--metric", "pmi_dc", "--name", "other"] if pmi else []))
                    with open(path, encoding="utf-8") as file:
                        header, *lines = map(json.loads, file)
                    self.assertEqual((header["task"], header["metric"]), ("other", "pmi_dc") if pmi else (task, metric))
                    self.assertEqual(len(lines), len(documents))
                    for line, (_, contexts, choices, domains, label) in zip(lines, documents):
                        self.assertEqual(line["label"], label)
                        self.assertEqual([bytes(c["continuation"]).decode() for c in line["choices"]], choices)
                        self.assertEqual([c["characters"] for c in line["choices"]], [len(c) - 1 for c in choices])
                        self.assertEqual([c["bytes"] for c in line["choices"]], [len(c.encode()) - 1 for c in choices])
                        for key, wanted in (("context", contexts), ("domain", domains if pmi else None)):
                            got = [c.get(key, line.get(key)) for c in line["choices"]]
                            if wanted is None:
                                self.assertEqual(set(map(str, got)), {"None"})
                            else:
                                expected = wanted * len(choices) if len(wanted) == 1 else wanted
                                self.assertEqual([bytes(ids).decode() for ids in got], expected)

    def describe(self, folder, name, **tokenizer):
        os.makedirs(self.path(folder), exist_ok=True)
        os.replace(self.path(name), self.path(f"{folder}/{name}"))
        with open(self.path(f"{folder}/data.json"), "w", encoding="utf-8") as file:
            json.dump({"dtype": "uint16", **tokenizer, "train": {"files": [name]}, "eval": {"files": []}}, file)
        return self.path(f"{folder}/{name}")

    def test_data_of_another_tokenizer_is_warned_of(self):
        one, other = {"tokenizer": "one.json", "tokenizer_sha256": "11"}, {"tokenizer": "one.json", "tokenizer_sha256": "22"}
        data = self.config["data"]
        data["train"], data["eval"] = [self.describe("train", "a.npy", **one)], [self.describe("same", "held_out.npy", **one)]
        strange = self.describe("strange", "b.npy", **other)
        says = "was made with another tokenizer than " + data["train"][0]
        result = self.train(self.config)
        self.assert_exit(result, 0)
        self.assertNotIn("another tokenizer", result.stderr)
        requests = self.prepare("copa")  # of bytes
        for arguments, warned in ((("--data", strange), strange), (("--sets", f"x={strange}"), strange), (("--tasks", requests), requests)):
            with self.subTest(arguments):
                result = parka("eval", self.path("run"), *arguments)
                self.assert_exit(result, 0)
                self.assertEqual(result.stderr.count(says), 1, result.stderr)
                self.assertIn(f"{warned} {says}", result.stderr)
        data["train"].append(strange)
        self.config["checkpoint"]["folder"] = self.path("mixed")
        result = self.train(self.config)
        self.assert_exit(result, 2)
        self.assertIn(f"{strange} {says}", result.stderr)
        # What is not there any more, or does not say, is no reason.
        os.remove(self.path("train/data.json"))
        self.assertNotIn("another tokenizer", parka("eval", self.path("run"), "--data", strange).stderr)

    def tokenizer(self, name, vocabulary, added=(), **others):
        os.makedirs(self.path(f"{name}/tokenizer"))
        tokens = [{"id": id, "content": token} for id, token in added]
        with open(self.path(f"{name}/tokenizer/tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump({"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": tokens, **others}, file)
        return self.path(f"{name}/tokenizer")

    def test_ids_of_another_tokenizer_than_the_models_are_refused(self):
        """It travels with the run, and the data of that are elsewhere by then."""
        sys.path.insert(0, os.path.dirname(PREPARE))
        from text_data.tokenizer import JsonTokenizer
        pairs = {"a": 0, "\u00e9\n": 1, "c": 2}
        own = self.tokenizer("own", pairs, [(3, "<end>")])
        same = [own, self.tokenizer("around", pairs, [(3, "<end>")], post_processor={"type": "TemplateProcessing"})]
        others = [self.tokenizer("swapped", {"a": 1, "\u00e9\n": 0, "c": 2}, [(3, "<end>")]), self.tokenizer("added", pairs, [(3, "<stop>")]),
                  self.tokenizer("scores", [["c", -1.25], ["a", -2.5]])]
        self.config["data"]["tokenizer"] = own
        self.assert_exit(self.train(self.config), 0)
        requests = self.prepare("copa")
        with open(requests, encoding="utf-8") as file:
            header, *lines = file.read().splitlines()

        def files_of(tokenizer):
            """A request file and token files made with it."""
            made = dict(tokenizer="bytes") if tokenizer is None else dict(tokenizer="tokenizer.json", tokenizer_sha256=str(len(tokenizer)))
            folder = os.path.dirname(tokenizer) if tokenizer else self.path("bytes")
            os.makedirs(folder, exist_ok=True)
            shutil.copy(self.path("held_out.npy"), f"{folder}/e.npy")
            with open(f"{folder}/data.json", "w", encoding="utf-8") as file:
                json.dump({"dtype": "uint16", **made, "train": {"files": []}, "eval": {"files": ["e.npy"]}}, file)
            if tokenizer:
                path = pathlib.Path(tokenizer) / "tokenizer.json"
                made["tokens_xxh3_128"] = JsonTokenizer.tokens_checksum.fget(types.SimpleNamespace(path=path))
            with open(f"{folder}/t.jsonl", "w", encoding="utf-8") as file:
                file.write("\n".join([json.dumps({**json.loads(header), "tokens_xxh3_128": None, **made}), *lines, ""]))
            return f"{folder}/e.npy", f"{folder}/t.jsonl"

        for tokenizer in (*same, *others, None):
            tokens, task = files_of(tokenizer)
            for option, file, key in (("--data", tokens, "data.eval"), ("--sets", tokens, "evaluation.sets"), ("--tasks", task, "evaluation.tasks")):
                given = f"x={file}" if option == "--sets" else file
                results = [parka("eval", self.path("run"), option, given)]
                self.config["training"]["steps"] += 1
                results.append(self.train(self.config, "--set", f'{key}=["{given}"]'))
                for result in results:
                    with self.subTest(tokenizer=tokenizer, option=option):
                        if tokenizer in same:
                            self.assert_exit(result, 0)
                        else:
                            self.assert_exit(result, 2)
                            self.assertIn(f"error: {file}", result.stderr)

    def test_predictions_do_not_replace_what_is_read(self):
        requests = self.prepare("copa")
        self.assert_exit(self.train(self.config), 0)
        for path in (requests, self.path("run/metrics.jsonl"), self.path("run/config.json"), self.path("held_out.npy")):
            with self.subTest(path), open(path, "rb") as file:
                result = parka("eval", self.path("run"), "--tasks", requests, "--data", self.path("held_out.npy"), "--predictions", path)
                self.assert_refused(result, [path, "this command reads it"])
                with open(path, "rb") as again:
                    self.assertEqual(again.read(), file.read())

    @unittest.skipIf(tokenizers is None, "the tokenizers package is missing")
    def test_tokenizer_json(self):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        texts = [text for _, contexts, choices, _, _ in TASKS["piqa"][1] for text in contexts + choices]
        # No end-of-document token, and settings that would damage requests if they were followed.
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.enable_truncation(3)
        tokenizer.save(self.path("tokenizer.json"))
        tokenizer.no_truncation()
        with open(self.prepare("piqa", "--tokenizer", self.path("tokenizer.json")), encoding="utf-8") as file:
            header, *lines = map(json.loads, file)
        self.assertEqual(header["tokenizer"], "tokenizer.json")
        for line, (_, contexts, choices, _, _) in zip(lines, TASKS["piqa"][1]):
            def ids(text):
                return tokenizer.encode(text, add_special_tokens=False).ids
            self.assertEqual(line["context"], [0, *ids(contexts[0])])  # with the <s> that the tokenizer asks for
            self.assertEqual([choice["continuation"] for choice in line["choices"]], [ids(text) for text in choices])
            self.assertLess(len(line["context"]), len(contexts[0]))  # not bytes

    def check_task(self, model, name, documents, metric, result, predictions):
        right, by_acc, by_length, bits = [], [], [], []
        for i, (_, contexts, choices, domains, label) in enumerate(documents):
            contexts, domains = (x * len(choices) if len(x) == 1 else x for x in (contexts, domains))
            own = [log_likelihood(model, *pair) for pair in zip(contexts, choices)]
            domain = [log_likelihood(model, *pair) for pair in zip(domains, choices)]
            line = predictions[name, i]
            self.assertEqual(line["label"], label)
            for got, want in zip(line["log_likelihood"] + line.get("domain_log_likelihood", []), own + domain):
                self.assertAlmostEqual(got, want, delta=2e-5 * abs(want))
            self.assertEqual("domain_log_likelihood" in line, metric == "pmi_dc")
            right.append(choice_by(metric, own, domain, choices) == label)
            by_acc.append(choice_by("acc", own, domain, choices) == label)
            by_length.append(choice_by("len_norm", own, domain, choices) == label)
            bits.append(-own[label] / len(choices[label][1:].encode()) / math.log(2))
        self.assertEqual(result["metric"], metric)
        self.assertEqual(result["documents"], len(documents))
        self.assertEqual((result["score"], result["acc"], result["len_norm"]),
                         tuple(sum(x) / len(x) for x in (right, by_acc, by_length)))
        self.assertAlmostEqual(result["bits_per_byte"], sum(bits) / len(bits), delta=1e-5)

    def test_scores_are_those_of_the_rules_and_of_training(self):
        wanted = {task: (metric, documents) for task, (metric, documents) in TASKS.items()}
        paths = [self.prepare(task) for task in TASKS]
        for task in ("winogrande", "hellaswag"):
            wanted["pmi_" + task] = ("pmi_dc", TASKS[task][1])
            paths.append(self.prepare(task, "--metric", "pmi_dc", "--name", "pmi_" + task, name="pmi_" + task))
        np.fromfile(self.path("a.npy"), "<u2")[::-1].tofile(self.path("back.npy"))
        self.config["evaluation"] = {"tasks": paths, "sets": [f"{n}={self.path(n)}.npy" for n in ("back", "held_out")]}
        self.assert_exit(self.train(self.config), 0)
        predictions_path = self.path("predictions.jsonl")
        result = self.evaluate("--tasks", *paths, "--predictions", predictions_path)
        with open(predictions_path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        predictions = {(line["task"], line["document"]): line for line in lines}
        self.assertEqual(len(predictions), len(lines))
        model = NumpyModel(self.path("run"), "step_00000006")
        self.assertEqual(list(result["tasks"]), list(wanted))
        self.assertNotIn("loss", result)
        for task, (metric, documents) in wanted.items():
            with self.subTest(task):
                self.check_task(model, task, documents, metric, result["tasks"][task], predictions)
        # Not all right and not all wrong: the comparison of scores says something.
        self.assertTrue(0 < sum(r["score"] for r in result["tasks"].values()) < len(wanted))

        # During training: the same numbers at the last step, and records at each evaluation.
        for task, scores in result["tasks"].items():
            records = [record for record in metrics(self.path("run"), "task") if record["task"] == task]
            self.assertEqual([record["step"] for record in records], [0, 3, 6])
            self.assertEqual({key: records[-1][key] for key in scores}, scores)
        # Without options all that the config names: the held-out files once as such and once as a set.
        everything = self.evaluate()
        self.assertEqual(everything["tasks"], result["tasks"])
        self.assertEqual(everything["sets"]["held_out"]["loss"], everything["loss"])
        for name, scores in everything["sets"].items():
            records = [record for record in metrics(self.path("run"), "eval_set") if record["set"] == name]
            self.assertEqual((records[-1]["step"], records[-1]["loss"]), (6, scores["loss"]))
            self.assertAlmostEqual(scores["perplexity"], math.exp(scores["loss"]), delta=1e-9 * scores["perplexity"])
        self.check_loss(model, "held_out", everything["sets"]["held_out"])

    def test_what_is_added_is_evaluated_and_what_is_left_out_keeps_its_records(self):
        def recorded():
            return [(record["kind"], record.get("set") or record.get("task"), record["step"]) for kind in ("eval", "eval_set", "task")
                    for record in metrics(self.path("run"), kind) if record["step"] == 6]

        self.config["evaluation"] = {"sets": [f"first={self.path('held_out.npy')}"], "tasks": [self.prepare("copa")]}
        self.assert_exit(self.train(self.config), 0)
        of_first = [("eval", None, 6), ("eval_set", "first", 6), ("task", "copa", 6)]
        self.assertEqual(recorded(), of_first)
        # As many as before, and then more.
        self.config["evaluation"] = {"sets": [f"second={self.path('held_out.npy')}"], "tasks": [self.prepare("arc_easy")]}
        self.assert_exit(self.train(self.config), 0)
        self.assertCountEqual(recorded(), [*of_first, ("eval_set", "second", 6), ("task", "arc_easy", 6)])
        self.config["evaluation"]["sets"] = [f"{name}={self.path('held_out.npy')}" for name in ("third", "fourth", "fifth")]
        self.assert_exit(self.train(self.config), 0)
        self.assertCountEqual(recorded(), [*of_first, ("task", "arc_easy", 6),
                                           *(("eval_set", name, 6) for name in ("second", "third", "fourth", "fifth"))])

    def check_loss(self, model, name, scores):
        """Mean over sequences of each one's mean, as OLMo has it; what is left of the file is dropped."""
        tokens = np.fromfile(self.path(name + ".npy"), "<u2").astype(int)
        losses = []
        for i in range(len(tokens) // CONTEXT):
            sequence = tokens[i * CONTEXT : (i + 1) * CONTEXT]
            rows = model.log_probabilities(sequence)[:-1]
            losses.append(-np.mean(rows[np.arange(CONTEXT - 1), sequence[1:]]))
        self.assertAlmostEqual(scores["loss"], np.mean(losses), delta=1e-5)
        self.assertEqual(scores["num_targets"], len(losses) * (CONTEXT - 1))

    def test_sets_tables_and_parts(self):
        self.assert_exit(self.train(self.config), 0)
        sets = [f"two={self.path('held_out.npy')}", f"two={self.path('b.npy')}", f"one={self.path('b.npy')}"]
        result = self.evaluate("--sets", *sets)
        self.assertEqual(list(result["sets"]), ["two", "one"])
        both = self.evaluate("--data", self.path("held_out.npy"), self.path("b.npy"))
        self.assertEqual(result["sets"]["two"]["loss"], both["loss"])
        self.assertEqual(result["sets"]["one"]["loss"], self.evaluate("--data", self.path("b.npy"))["loss"])
        tasks = [self.prepare("arc_easy"), self.prepare("copa")]
        some = self.evaluate("--tasks", *tasks, "--max-documents", "2")["tasks"]
        self.assertEqual([task["documents"] for task in some.values()], [2, 2])
        table = parka("eval", self.path("run"), "--sets", *sets, "--tasks", *tasks).stdout
        for pattern in (r"two +\d+\.\d{6} ", r"arc_easy +acc +[01]\.\d{4} .* 3\n", r"copa +acc +[01]\.\d{4} .* 2\n"):
            self.assertRegex(table, pattern)

    def test_every_recipe_scores_about_the_same(self):
        self.assert_exit(self.train(self.config), 0)
        paths = [self.prepare(task) for task in TASKS]
        # The weights of an FP32 run cannot be read in another recipe: one run each, near to each other.
        want = self.evaluate("--tasks", *paths)["tasks"]
        for recipe in ("bf16", "fp8_block", "coat", "parka"):
            with self.subTest(recipe):
                folder = self.path(recipe)
                config = tiny_config(self.folder, recipe, steps=6, lr=1e-2)
                for section in ("model", "data"):
                    config[section] = self.config[section]
                config["checkpoint"]["folder"] = folder
                self.assert_exit(self.train(config), 0)
                result = parka("eval", folder, "--tasks", *paths, "--json")
                self.assert_exit(result, 0)
                got = json.loads(result.stdout)["tasks"]
                for task, scores in want.items():
                    self.assertAlmostEqual(got[task]["bits_per_byte"] / scores["bits_per_byte"], 1, delta=0.05, msg=task)

    def assert_refused(self, result, words):
        self.assert_exit(result, 2)
        self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_bad_request_files(self):
        self.config["training"].update(eval_interval=0)
        self.assert_exit(self.train(self.config), 0)
        with open(self.prepare("copa"), encoding="utf-8") as file:
            header, first, second = map(json.loads, file)
        self.assertEqual(header["documents"], 2)

        def with_choice(**changes):
            return {**first, "choices": [{**first["choices"][0], **changes}, first["choices"][1]]}

        for name, lines, words in [
            ("empty", [], ["has no documents"]),
            ("no documents", [header], ["has no documents"]),
            ("no header", [first, second], ["line 1", "request file"]),
            ("version", [{**header, "version": 3}, first], ["line 1", "version"]),
            ("metric", [{**header, "metric": "f1"}, first], ["line 1", "f1"]),
            ("no task", [{**header, "task": ""}, first], ["line 1", "task"]),
            ("cut", [header, first], ["documents", "1", "2"]),
            ("documents of text", [{**header, "documents": "2"}, first, second], ["line 1", "documents"]),
            ("a number", [header, 7], ["line 2", "JSON object"]),
            ("label", [header, first, {**second, "label": 2}], ["line 3", "label", "0 to 1"]),
            ("label of text", [header, {**first, "label": "1"}], ["line 2", "label"]),
            ("no choices", [header, {"label": 0, "context": [1]}], ["line 2", "choices"]),
            ("one choice", [header, {**first, "choices": first["choices"][:1]}], ["line 2", "choices"]),
            ("no context", [header, {**first, "context": []}], ["line 2", "context"]),
            ("missing context", [header, {k: v for k, v in first.items() if k != "context"}], ["line 2", "context"]),
            ("no domain", [{**header, "metric": "pmi_dc"}, first], ["line 2", "domain"]),
            ("foreign id", [header, {**first, "context": [1, 272]}], ["line 2", "272", "vocabulary"]),
            ("negative id", [header, {**first, "context": [-1]}], ["line 2", "-1"]),
            ("fraction", [header, {**first, "context": [1.5]}], ["line 2", "1.5"]),
            ("no characters", [header, with_choice(characters=0)], ["line 2", "characters"]),
            ("long continuation", [header, with_choice(continuation=[1] * (CONTEXT + 1))], ["line 2", "97", "96"]),
        ]:
            with self.subTest(name):
                path = self.path("bad.jsonl")
                with open(path, "w", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
                self.assert_refused(parka("eval", self.path("run"), "--tasks", path), ["bad.jsonl", *words])
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n" + json.dumps(first)[:-9])
        self.assert_refused(parka("eval", self.path("run"), "--tasks", path), ["bad.jsonl, line 2"])
        twice = self.prepare("copa"), self.prepare("copa", name="again")
        self.assert_refused(parka("eval", self.path("run"), "--tasks", *twice), ["copa", "--name"])
        self.config["evaluation"] = {"tasks": [path]}
        self.config["checkpoint"]["folder"] = self.path("other")
        self.config["training"].update(eval_interval=1)
        self.assert_refused(self.train(self.config), ["bad.jsonl, line 2"])

    def test_bad_documents(self):
        good = TASKS["copa"][1][0][0]
        out = self.path("out.jsonl")
        for name, line, words in [
            ("no JSON", "{", ["line 2", "JSON"]),
            ("a list", "[1]", ["line 2", "copa"]),
            ("another task", json.dumps(TASKS["piqa"][1][0][0]), ["line 2", "copa"]),
            ("no label", json.dumps({**good, "label": -1}), ["line 2", "-1"]),
            ("empty choice", json.dumps({**good, "choice1": ""}), ["line 2"]),
            ("number for a text", json.dumps({**good, "premise": 3}), ["line 2", "copa"]),
            ("half a surrogate", json.dumps({**good, "premise": "\ud800."}), ["line 2", "Unicode"]),
        ]:
            with self.subTest(name):
                with open(self.path("in.jsonl"), "w", encoding="utf-8") as file:
                    file.write(json.dumps(good) + "\n" + line + "\n")
                self.assert_refused(prepare("--task", "copa", self.path("in.jsonl"), "--out", out), ["prepare_eval: error", *words])
                self.assertFalse(os.path.exists(out))
        arc = {**HUGGING_FACE_ARC, "answerKey": ""}
        boolq = {"passage": "It is.", "question": "is it", "label": -1}
        book = {"question_stem": "Who", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "BC"}
        for task, document in [("arc_easy", arc), ("boolq", boolq), ("openbook_qa", book), ("openbook_qa", {**book, "answerKey": ""})]:
            with self.subTest(task):
                with open(self.path("in.jsonl"), "w", encoding="utf-8") as file:
                    file.write(json.dumps(document) + "\n")
                self.assert_refused(prepare("--task", task, self.path("in.jsonl"), "--out", out), ["does this split have labels?"])
        for arguments, words in [
            ((self.path("nowhere.jsonl"), "--task", "copa", "--out", out), ["nowhere.jsonl"]),
            ((self.path("in.jsonl"), "--task", "coppa", "--out", out), ["coppa"]),
            ((self.path("in.jsonl"), "--task", "copa", "--out", out, "--tokenizer", self.path("t.json")), ["t.json"]),
            ((self.path("in.jsonl"), "--task", "copa", "--out", out, "--name", " "), ["--name"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(prepare(*arguments), words)
        open(self.path("in.jsonl"), "w").close()
        self.assert_refused(prepare("--task", "copa", self.path("in.jsonl"), "--out", out), ["in.jsonl", "no documents"])


if __name__ == "__main__":
    unittest.main()
