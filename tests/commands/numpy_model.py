"""A model's forward pass in numpy, float64, from the checkpoint of a run: what Parka's numbers are held against."""
import json
import os

import numpy as np


def read_tensors(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        content = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(content[begin:end], "<f4").reshape(entry["shape"]).astype(np.float64)
    return tensors


class NumpyModel:
    """Of an FP32 run of one rank."""

    def __init__(self, run_folder, checkpoint):
        self.weights = read_tensors(os.path.join(run_folder, checkpoint, "shard_0.safetensors"))
        with open(os.path.join(run_folder, "config.json"), encoding="utf-8") as file:
            self.model = json.load(file)["model"]

    def norm(self, x, name):
        eps = self.model["norm_eps"]
        if self.model["norm"] == "layernorm":
            x = x - x.mean(-1, keepdims=True)
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.weights[name].reshape(-1)

    def rotate(self, x):
        """x [heads, S, D]: element i turns with element i + D / 2."""
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(x.shape[1]), self.model["rope_theta"] ** (-np.arange(half) / half))
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], -1)

    def attention(self, x, prefix):
        heads, kv_heads = self.model["num_heads"], self.model["num_kv_heads"]
        length, head_dim = len(x), self.model["d_model"] // heads
        qkv = (x @ self.weights[prefix + "qkv"].T).reshape(length, heads + 2 * kv_heads, head_dim).transpose(1, 0, 2)
        q, k, v = qkv[:heads], qkv[heads : heads + kv_heads], qkv[heads + kv_heads :]
        q, k = self.rotate(q), np.repeat(self.rotate(k), heads // kv_heads, 0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(head_dim)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = p @ np.repeat(v, heads // kv_heads, 0)
        return out.transpose(1, 0, 2).reshape(length, -1) @ self.weights[prefix + "attention_out"].T

    def log_probabilities(self, tokens):
        """[S, V] of the token that follows each."""
        x = self.weights["embedding"][tokens]
        for i in range(self.model["num_layers"]):
            prefix = f"blocks.{i}."
            x = x + self.attention(self.norm(x, prefix + "attention_norm"), prefix)
            up, gate = np.split(self.norm(x, prefix + "ffn_norm") @ self.weights[prefix + "up_gate"].T, 2, -1)
            x = x + (up * gate / (1 + np.exp(-gate))) @ self.weights[prefix + "down"].T
        logits = self.norm(x, "final_norm") @ self.weights["embedding" if self.model["tie_embeddings"] else "head"].T
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
