"""The layers of src/: which folder may include which, and that a file includes what it uses."""
import re
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
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


# What a file uses is looked for without a compiler, which would take minutes: names at the beginning of a line in one header
# alone. Builds that join the files of a folder do not notice that an include is missing.
NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
FUNCTION = re.compile(r"^(?:\[\[[^\]]*\]\] )?(?!return|else|throw|using|struct|class)[A-Za-z_][\w:<>,&* ]*?[ &*](\w+)\(", re.MULTILINE)
TYPE = re.compile(r"^(?:struct|class|enum class) (\w+)(?: final)?(?: : [^{;]*)? \{", re.MULTILINE)
USE = re.compile(r"(?<![\w.>:~])([A-Za-z_]\w*)(\(|::)")
# Members, variables and parameters of a name.
OWN = r"(?:[>&*\w]\s+|[&*]|auto )(?<!return )(?<!throw )(?<!else ){}\b"


def code_of(text):
    return NO_CODE.sub('""', text)


def declarations(headers):
    """The header of each function and type that exactly one of them declares: {(name, what follows its use): header}."""
    found = {}
    for header, code in headers.items():
        for pattern, follows in ((FUNCTION, "("), (TYPE, "::")):
            for match in pattern.finditer(code):
                found.setdefault((match[1], follows), set()).add(header)
    return {use: next(iter(where)) for use, where in found.items() if len(where) == 1}


def reached(name, includes, seen=None):
    seen = {name} if seen is None else seen
    for included in includes.get(name, ()):
        if included not in seen:
            seen.add(included)
            reached(included, includes, seen)
    return seen


def missing_includes(texts):
    """Of {path: text} those that use what a header declares and reach it by no include: "PATH uses NAME of HEADER"."""
    codes = {name: code_of(text) for name, text in texts.items()}
    includes = {name: INCLUDE.findall(text) for name, text in texts.items()}
    declared = declarations({name: code for name, code in codes.items() if name.endswith(".h")})
    wrong = []
    for name, code in codes.items():
        reach = reached(name, includes)
        for use in sorted(set(USE.findall(code))):
            header = declared.get(use)
            if header is None or header in reach or refused(name, header) is not None:
                continue
            own = re.compile(OWN.format(use[0]))
            if not any(own.search(codes[other]) for other in reach if other in codes):
                wrong.append(f"{name} uses {use[0]} of {header}")
    return wrong


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
                               ("data/data_order.h", "nowhere/data_order.h")):
            self.assertIsNotNone(refused(path, included), (path, included))
        self.assertIsNone(refused("engine/training/progress.h", "engine/config/config.h"))

    def test_every_file_includes_what_it_uses(self):
        texts = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in sources()}
        texts = {name: text for name, text in texts.items() if name.endswith((".h", ".cpp"))}
        wrong = missing_includes(texts)
        self.assertEqual(wrong, [], "\n".join(wrong))

    def test_a_missing_include_is_found(self):
        texts = {"core/log.h": "void log_it(int x);\n", "core/kind.h": "enum class Kind {\n  kA };\nint count_of(Kind kind) {\n",
                 "core/both.h": '#include "core/log.h"\n#include "core/kind.h"\n'}
        uses = {"function": "void f() { log_it(1); }\n", "in an expression": "int f(Kind k) { return count_of(k); }\n",
                "type": "bool f() { return Kind::kA == Kind::kA; }\n"}
        for what, code in uses.items():
            with self.subTest(what):
                self.assertEqual(len(missing_includes({**texts, "data/a.cpp": code})), 1)
                self.assertEqual(missing_includes({**texts, "data/a.cpp": '#include "core/both.h"\n' + code}), [])
        own = "// log_it(1)\nstruct A {\n  void log_it(int);\n  void g() { log_it(1); b.log_it(2); c::log_it(3); }\n};\n"
        self.assertEqual(missing_includes({**texts, "data/a.cpp": own}), [])

    def test_every_file_lies_in_a_layer(self):
        self.assertEqual([str(path) for path in sources() if layer_of(str(path.relative_to(SOURCE))) is None], [])

    def test_includes_are_of_files_that_exist(self):
        for path in sources():
            for included in INCLUDE.findall(path.read_text(encoding="utf-8")):
                self.assertTrue((SOURCE / included).exists(), f"{path}: {included}")


if __name__ == "__main__":
    unittest.main()
