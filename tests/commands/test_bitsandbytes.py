"""Models that bitsandbytes has quantized to 4 bits (tests/fixtures/make_bitsandbytes_fixture.py) from the command line."""
import json
import os
import shutil
import struct
import unittest

from parka_runs import RunFolder, parka, write_tokens

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "bitsandbytes")

try:
    import numpy as np
except ImportError:
    raise SystemExit(77)

ELEMENTS = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8}


def read_header(path):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        return json.loads(file.read(size)), 8 + size


def load(path):
    """The tensors of a safetensors file, bf16 as fp32."""
    header, begin = read_header(path)
    with open(path, "rb") as file:
        data = file.read()[begin:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        elements = np.frombuffer(data[first:end], ELEMENTS[entry["dtype"]])
        if entry["dtype"] == "BF16":
            elements = (elements.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = elements.reshape(entry["shape"])
    return tensors


class BitsAndBytes(RunFolder):
    def run_ok(self, *arguments):
        result = parka(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout + result.stderr

    def test_weights_are_decoded_as_bitsandbytes_does(self):
        for kind in ("nf4", "fp4"):
            model, out = os.path.join(self.folder, kind), os.path.join(self.folder, kind + "_out")
            self.run_ok("import", os.path.join(FIXTURES, kind), "--out", model)
            self.run_ok("export", model, "--out", out)
            weights, expected = load(os.path.join(out, "model.safetensors")), load(os.path.join(FIXTURES, kind + "_decoded.safetensors"))
            self.assertEqual(len(expected), 9)
            for name, weight in expected.items():
                np.testing.assert_array_equal(weights[name], weight, err_msg=f"{kind} {name}")
            with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
                self.assertNotIn("quantization_config", json.load(file))

    def test_codes_may_be_stored_as_elements_of_other_formats(self):
        model, plain, stored = (os.path.join(self.folder, name) for name in ("model", "plain", "stored"))
        self.run_ok("import", os.path.join(FIXTURES, "nf4"), "--out", plain)
        for dtype, size in (("BF16", 2), ("F16", 2), ("F32", 4)):
            with self.subTest(dtype):
                shutil.copytree(os.path.join(FIXTURES, "nf4"), model)
                path = os.path.join(model, "model.safetensors")
                header, begin = read_header(path)
                with open(path, "rb") as file:
                    data = file.read()[begin:]
                quantized = [name.split(".quant_state.")[0] for name in header if ".quant_state." in name]
                self.assertTrue(quantized)
                for name in quantized:
                    header[name].update(dtype=dtype, shape=[header[name]["shape"][0] // size, 1])
                text = json.dumps(header).encode()
                with open(path, "wb") as file:
                    file.write(struct.pack("<Q", len(text)) + text + data)
                self.run_ok("import", model, "--out", stored)
                for name in sorted(os.listdir(plain)):
                    if name.startswith("shard_"):
                        with open(os.path.join(plain, name), "rb") as one, open(os.path.join(stored, name), "rb") as other:
                            self.assertTrue(one.read() == other.read(), name)
                shutil.rmtree(model)
                shutil.rmtree(stored)

    def test_weights_of_fp16_are_rounded_to_it(self):
        source, model, out = os.path.join(FIXTURES, "nf4"), os.path.join(self.folder, "model"), os.path.join(self.folder, "out")
        changed = os.path.join(self.folder, "fp16")
        shutil.copytree(source, changed)
        path = os.path.join(changed, "model.safetensors")
        with open(path, "rb") as file:
            text = file.read()
        self.assertIn(b'"dtype": "bfloat16"', text)
        with open(path, "wb") as file:
            file.write(text.replace(b'"dtype": "bfloat16"', b'"dtype": "float16" '))
        for folder, name in ((source, "bf16"), (changed, "fp16")):
            self.run_ok("import", folder, "--out", f"{model}_{name}")
            self.run_ok("export", f"{model}_{name}", "--out", f"{out}_{name}", "--dtype", "fp32")
        bf16, fp16 = (load(os.path.join(f"{out}_{name}", "model.safetensors")) for name in ("bf16", "fp16"))
        name = "model.layers.0.mlp.down_proj.weight"
        np.testing.assert_array_equal(fp16[name], fp16[name].astype(np.float16).astype(np.float32))
        self.assertGreater(np.abs(fp16[name] - bf16[name]).max(), 0)
        np.testing.assert_allclose(fp16[name], bf16[name], rtol=2 ** -8)

    def test_adapters_are_trained_beside_such_a_model(self):
        model, run = os.path.join(self.folder, "model"), os.path.join(self.folder, "run")
        self.run_ok("import", os.path.join(FIXTURES, "nf4"), "--out", model)
        write_tokens(f"{self.folder}/tokens.npy", 2000, 5, 83)
        settings = {"data.train": json.dumps([f"{self.folder}/tokens.npy"]), "data.sequence_length": 16, "checkpoint.folder": run,
                    "device.kind": "cpu", "finetune.method": "lora", "finetune.base": "nf4", "training.steps": 2, "optimizer.schedule.warmup_steps": 0,
                    "training.global_batch_size": 2, "training.eval_interval": 0}
        self.run_ok("train", os.path.join(model, "config.json"), *(f"--set={key}={value}" for key, value in settings.items()))

    def test_what_does_not_fit_is_refused(self):
        source = os.path.join(FIXTURES, "nf4")
        name = "model.layers.0.mlp.down_proj.weight"
        state = name + ".quant_state.bitsandbytes__nf4"

        def refusal(change_config=None, change_header=None, change_state=None):
            folder = os.path.join(self.folder, "bad")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            if change_config:
                with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
                    config = json.load(file)
                change_config(config)
                with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                    json.dump(config, file)
            path = os.path.join(folder, "model.safetensors")
            header, begin = read_header(path)
            with open(path, "rb") as file:
                data = bytearray(file.read()[begin:])
            if change_state:
                first, end = header[state]["data_offsets"]
                text = change_state(bytes(data[first:end]))
                self.assertEqual(len(text), end - first)
                data[first:end] = text
            if change_header:
                change_header(header)
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with open(path, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + data)
            result = parka("import", folder, "--out", os.path.join(self.folder, "out"))
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertFalse(os.path.exists(os.path.join(self.folder, "out")))
            return result.stderr

        def rename(old, new):
            return lambda header: header.update({new: header.pop(old)})

        def eight_bits(config):
            config["quantization_config"].update(load_in_4bit=False, load_in_8bit=True)

        self.assertIn("but that of bitsandbytes in 4 bits", refusal(change_config=eight_bits))
        self.assertIn(f"the tensor {name}.absmax is missing", refusal(change_header=rename(name + ".absmax", name + ".absmaxi")))
        self.assertIn("is [1024, 1]", refusal(change_header=rename(state, name + ".quant_state.other")))
        self.assertIn('"quant_type": "nf5"', refusal(change_state=lambda text: text.replace(b'"nf4"', b'"nf5"')))
        self.assertIn('"blocksize": 60', refusal(change_state=lambda text: text.replace(b'"blocksize": 64', b'"blocksize": 60')))
        self.assertIn("are wanted", refusal(change_state=lambda text: text.replace(b"[32, 64]", b"[32, 65]")))
        self.assertIn('"dtype": "bfloat17"', refusal(change_state=lambda text: text.replace(b'"bfloat16"', b'"bfloat17"')))


if __name__ == "__main__":
    unittest.main()
