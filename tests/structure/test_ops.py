"""CUDA kernels take the workspace that the plan counts."""
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


def headers_of(root):
    return (root / "src/kernels/ops").rglob("*.h")


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


class Ops(unittest.TestCase):
    def test_kernels_take_the_workspace_that_the_plan_counts(self):
        taking = [path for path in sources(ROOT / "src/kernels/cuda") if ".workspace(" in read(path)]
        self.assertGreater(len(taking), 10)
        self.assertEqual(workspace_faults(ROOT), [])

    def test_workspace_that_no_plan_counts_is_found(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            root = Path(folder)
            shutil.copytree(ROOT / "src/kernels", root / "src/kernels")
            with open(root / "src/kernels/cuda/elementwise/pointwise.cu", "a", encoding="utf-8") as file:
                file.write('auto* one = device.workspace("add", workspace_of(a));\n'
                           'auto* two = static_cast<float*>(device.workspace("gemm", 4 * rows));\n')
            found = workspace_faults(root)
        self.assertEqual(found, ["pointwise.cu: add takes workspace, and its header declares no workspace_of()",
                                 "pointwise.cu: takes 4 * rows bytes of workspace, not workspace_of(a)"])


if __name__ == "__main__":
    unittest.main()
