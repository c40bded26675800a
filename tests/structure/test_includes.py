"""The layers of src/: which folder may include which, and that no folder holds more files than one can overlook."""
import re
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
MOST_FILES = 30
# From the lowest to the highest. A file includes files of its own folder and of folders above it in this list, never of one
# below. What a folder may not include though it is higher stands in NEVER.
LAYERS = [
    "core",
    "kernels/device",
    "kernels/device/cuda",
    "kernels/op",
    "kernels/ops",
    "kernels/cpu",
    "kernels/cuda",
    "kernels",
    "comm",
    "data",
    "model",
    "optim",
    "engine/files",
    "engine/config",
    "engine/checkpoint",
    "engine/huggingface",
    "engine/text",
    "engine/evaluation",
    "engine/step",
    "engine/training",
    "engine/products",
    "engine/planning",
    "engine/commands",
]
NEVER = {
    "data": ["kernels", "comm"],
    "model": ["comm", "data"],
    "optim": ["comm", "data", "model"],
    "kernels/cpu": ["kernels/cuda", "kernels/device/cuda"],  # the reference shares nothing with what it judges
    "engine": ["kernels/cuda", "kernels/device/cuda", "comm/cuda"],  # nor does anyone else know CUDA
}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def layer_of(path):
    """The longest entry of LAYERS that `path` lies in, by its number."""
    found = [(len(layer), number) for number, layer in enumerate(LAYERS) if path.startswith(layer + "/")]
    return max(found)[1] if found else None


def refused(path, included):
    """Why the file `path` must not include `included`; None where it may. Both are relative to src/."""
    own, other = layer_of(path), layer_of(included)
    if other is None:
        return "is no file of src/"
    if other > own:
        return f"{LAYERS[other]} is above {LAYERS[own]}"
    for folder, never in NEVER.items():
        if path.startswith(folder + "/") and any(included.startswith(f"{entry}/") for entry in never):
            return f"{folder} must not know {Path(included).parent}"
    return None


def sources():
    return [path for path in sorted(SOURCE.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]


class Structure(unittest.TestCase):
    def test_no_include_goes_up(self):
        wrong = []
        for path in sources():
            name = str(path.relative_to(SOURCE))
            for included in INCLUDE.findall(path.read_text(encoding="utf-8")):
                reason = refused(name, included)
                if reason:
                    wrong.append(f"src/{name} includes {included}: {reason}")
        self.assertEqual(wrong, [], "\n".join(wrong))

    def test_an_upward_include_is_refused(self):
        for path, included in (("core/error.h", "data/token_file.h"), ("engine/config/config.h", "engine/training/progress.h"),
                               ("model/model.h", "comm/communicator.h"), ("kernels/cpu/gemm/gemm.cpp", "kernels/cuda/gemm/gemm.h"),
                               ("data/mixture.h", "nowhere/mixture.h")):
            self.assertIsNotNone(refused(path, included), (path, included))
        self.assertIsNone(refused("engine/training/progress.h", "engine/config/config.h"))

    def test_every_file_lies_in_a_layer(self):
        self.assertEqual([str(path) for path in sources() if layer_of(str(path.relative_to(SOURCE))) is None], [])

    def test_no_folder_is_crowded(self):
        for folder in {path.parent for path in sources()}:
            self.assertLessEqual(sum(path.is_file() for path in folder.iterdir()), MOST_FILES, folder)

    def test_includes_are_of_files_that_exist(self):
        for path in sources():
            for included in INCLUDE.findall(path.read_text(encoding="utf-8")):
                self.assertTrue((SOURCE / included).exists(), f"{path}: {included}")


if __name__ == "__main__":
    unittest.main()
