"""What `cmake --install`, the Debian package and the wheel put where, and that it runs there."""
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import venv
from pathlib import Path

BUILD = os.environ.get("BUILD_FOLDER", "build/release")
ROOT = Path(__file__).resolve().parents[2]
EXPECTED = ["bin/parka", "share/parka/configs/quickstart.json", "share/parka/configs/parka.schema.json",
            "share/parka/configs/tuning/llama2-7b.parka.tuning.json",
            "share/parka/scripts/prepare_data.py", "share/parka/scripts/plot.py", "share/parka/scripts/launch.sh",
            "share/parka/scripts/requirements.txt", "share/doc/parka/copyright", "share/doc/parka/docs/install.md",
            "share/doc/parka/docs/results/peers.png"]


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    if result.returncode != 0:
        raise AssertionError(f"{command}: {result.stdout}{result.stderr}")
    return result.stdout


class Install(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def check_tree(self, prefix):
        self.assertEqual([folder for folder, *inside in os.walk(prefix) if not any(inside)], [])
        for name in EXPECTED:
            self.assertGreater((prefix / name).stat().st_size, 0, name)
        scripts = {path.name for path in (prefix / "share/parka/scripts").rglob("*")}
        self.assertFalse(scripts & {"setup.sh", "test.sh", "figures.py", "attention_vs_cudnn.py", "kill_drill.py", "__pycache__"})
        plan = run(prefix / "bin/parka", "plan", prefix / "share/parka/configs/llama2-7b.json", cwd=self.folder)
        self.assertIn("GB", plan)
        help_text = run(sys.executable, prefix / "share/parka/scripts/prepare_data.py", "--help", cwd=self.folder)
        self.assertIn("--tokenizer", help_text)
        run("bash", prefix / "share/parka/scripts/launch.sh", "--help", cwd=self.folder)

    def test_cmake_install(self):
        run("cmake", "--install", BUILD, "--prefix", self.folder / "usr")
        self.check_tree(self.folder / "usr")

    @unittest.skipUnless(importlib.util.find_spec("scikit_build_core"), "scikit-build-core of scripts/requirements-dev.txt is not installed")
    def test_the_wheel_trains_in_an_empty_environment(self):
        """Its Python side alone is built, and the program that is built already is installed into it, as scikit-build-core does."""
        venv.create(self.folder / "venv")
        python = self.folder / "venv/bin/python"
        packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")  # what builds it, and packages of parka prepare
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check",
            "--config-settings=wheel.cmake=false", f"--config-settings=build-dir={self.folder}/build", ROOT)
        run("cmake", "--install", BUILD, "--prefix", packages / "parka")
        self.check_tree(packages / "parka")
        parka = self.folder / "venv/bin/parka"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PARKA_")} | {"HOME": str(self.folder)}
        model = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_ffn": 64, "vocab_size": 272}
        (self.folder / "a.json").write_text(json.dumps({"model": model, "data": {"sequence_length": 32}, "device": {"kind": "cpu"}, "checkpoint": {"folder": "run"},
                                                        "training": {"steps": 3, "global_batch_size": 2, "micro_batch_size": 2}}), encoding="utf-8")
        (self.folder / "a.txt").write_text("A text. " * 500, encoding="utf-8")
        run(parka, "prepare", "a.txt", "--tokenizer", "bytes", "--out", "data", cwd=self.folder, env=environment)
        run(parka, "train", "a.json", "--data", "data", cwd=self.folder, env=environment)
        self.assertTrue((self.folder / "run/step_00000003").is_dir())
        self.assertIn("Requires-Dist: numpy", next(packages.glob("parka-*.dist-info/METADATA")).read_text(encoding="utf-8"))

    def test_debian_package(self):
        for tool in ("cpack", "dpkg-deb", "dpkg-shlibdeps", "file"):
            if shutil.which(tool) is None:
                self.skipTest(f"{tool} is not installed")
        run("cpack", "--config", f"{BUILD}/CPackConfig.cmake", "-B", self.folder)
        (package,) = self.folder.glob("parka_*.deb")
        fields = dict(re.findall(r"^ ([A-Z][\w-]*): (.*)$", run("dpkg-deb", "--info", package), re.MULTILINE))
        version = run(os.environ.get("PARKA_PROGRAM", f"{BUILD}/parka"), "--version").split()[1]
        self.assertEqual((fields["Package"], fields["Version"]), ("parka", version))
        for library in ("libc6", "libstdc++6"):
            self.assertIn(library, fields["Depends"])
        run("dpkg-deb", "--extract", package, self.folder / "root")
        self.check_tree(self.folder / "root/usr")
        # Every library that the program wants is of a package that it depends on, or comes with one of these.
        program = self.folder / "root/usr/bin/parka"
        needed = re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", program))
        self.assertNotIn("not found", run("ldd", program))
        self.assertEqual([name for name in needed if name.startswith(("libspdlog", "libfmt", "libcudart"))], [])


if __name__ == "__main__":
    unittest.main()
