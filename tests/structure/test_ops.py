"""What docs/extending.md says of an op: one declaration, checks, two implementations and a test, each in its place."""
import functools
import re
import shutil
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECLARED = re.compile(r"^PARKA_OP\((\w+), (\w+)\);", re.MULTILINE)


@functools.lru_cache(maxsize=None)
def read(path):
    return path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=None)
def sources(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))


def signature(name, arguments):
    return rf"\bvoid {name}\((?:::parka::)?Device& ?\w*, const {arguments}& ?\w*\)"


def files_with(folder, pattern, suffixes):
    """Of a folder and those below it, relative to it."""
    return [str(path.relative_to(folder)) for path in sources(folder)
            if path.suffix in suffixes and re.search(pattern, read(path), re.MULTILINE)]


def headers_of(root):
    return (root / "src/kernels/ops").rglob("*.h")


def faults_of(root, header, name, arguments):
    """What is wrong with the op `name` that src/kernels/ops/`header` declares. `header` is FOLDER/FILE."""
    kernels = root / "src/kernels"
    source = header.replace(".h", ".cpp")
    defined = signature(name, arguments) + r" \{"
    found = []
    for what, folder, pattern in (("definition", "ops", defined), ("dispatch", "ops", rf"\bPARKA_DISPATCH\({name}, "),
                                  ("cost", "ops", rf"^OpCost cost_of\(const {arguments}&"),
                                  ("output", "ops", rf"^TensorView output_of\(const {arguments}&"),
                                  ("reference", "cpu", defined)):
        files = files_with(kernels / folder, pattern, (".cpp",))
        if files != [source]:
            found.append(f"{name}: its {what} lies in {files} of {folder}/, not in {source}")
    folder = Path(header).parent
    if len(files_with(kernels / "cuda" / folder, defined, (".cu", ".cpp"))) != 1:
        found.append(f"{name}: there is not one definition below cuda/{folder}/")
    declared = files_with(root / "src", signature(name, arguments), (".h", ".cuh"))
    if declared:
        found.append(f"{name}: PARKA_OP declares it, and so do {declared}")
    if f'#include "kernels/ops/{header}"' not in read(kernels / "ops.h"):
        found.append(f"{name}: kernels/ops.h does not include ops/{header}")
    if not files_with(root / "tests/kernels", rf"\b{name}\(", (".cpp", ".h")):
        found.append(f"{name}: tests/kernels has no test of it")
    return found


def workspace_faults(root):
    """Kernels that take workspace by another function than the plan counts it by."""
    declared = {name: arguments for header in headers_of(root)
                for name, arguments in DECLARED.findall(read(header))}
    headers = "".join(read(header) for header in headers_of(root))
    found = []
    for path in sources(root / "src/kernels/cuda"):
        text = read(path)
        for op, size in re.findall(r"\.workspace\(([^,]+), ([^;]*?)\)\)?\)?;", text):
            if not re.fullmatch(r"workspace_of\(a\)?|k\w*WorkspaceBytes", size):
                found.append(f"{path.name}: takes {size} bytes of workspace, not workspace_of(a)")
            names = [op.strip('"')] if op.startswith('"') else re.findall(rf'\b{op} = "(\w+)"|zero_amax\(device, "(\w+)"', text)
            for name in (name if isinstance(name, str) else name[0] or name[1] for name in names):
                if f"int64_t workspace_of(const {declared[name]}& a);" not in headers:
                    found.append(f"{path.name}: {name} takes workspace, and its header declares no workspace_of()")
    return found


def faults(root):
    return [fault for header in sorted(headers_of(root))
            for name, arguments in DECLARED.findall(read(header)) for fault in faults_of(root, header.relative_to(root / "src/kernels/ops").as_posix(), name, arguments)]


class Ops(unittest.TestCase):
    def test_every_op_has_its_four_files_and_a_test(self):
        declared = sum(len(DECLARED.findall(read(header))) for header in headers_of(ROOT))
        self.assertGreater(declared, 20)
        self.assertEqual(faults(ROOT), [])

    def test_kernels_take_the_workspace_that_the_plan_counts(self):
        taking = [path for path in sources(ROOT / "src/kernels/cuda") if ".workspace(" in read(path)]
        self.assertGreater(len(taking), 10)
        self.assertEqual(workspace_faults(ROOT), [])

    def test_workspace_that_no_plan_counts_is_found(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            root = Path(folder)
            shutil.copytree(ROOT / "src/kernels", root / "src/kernels")
            with open(root / "src/kernels/cuda/elementwise/add.cu", "a", encoding="utf-8") as file:
                file.write('auto* one = device.workspace("add", workspace_of(a));\n'
                           'auto* two = static_cast<float*>(device.workspace("gemm", 4 * rows));\n')
            found = workspace_faults(root)
        self.assertEqual(found, ["add.cu: add takes workspace, and its header declares no workspace_of()",
                                 "add.cu: takes 4 * rows bytes of workspace, not workspace_of(a)"])

    def test_what_is_missing_or_twice_is_found(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            root = Path(folder)
            for part in ("src/kernels", "tests/kernels"):
                shutil.copytree(ROOT / part, root / part)
            for file in ("cpu/elementwise/add.cpp", "cuda/elementwise/add.cu"):
                (root / "src/kernels" / file).unlink()
            with open(root / "src/kernels/device/arena.h", "a", encoding="utf-8") as file:
                file.write("namespace parka::cuda {\nvoid gemm(Device& device, const Gemm& a);\n}\n")
            found = faults(root)
        self.assertEqual(found, ["add: its reference lies in [] of cpu/, not in elementwise/add.cpp",
                                 "add: there is not one definition below cuda/elementwise/",
                                 "gemm: PARKA_OP declares it, and so do ['kernels/device/arena.h']"])


if __name__ == "__main__":
    unittest.main()
