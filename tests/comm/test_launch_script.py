#!/usr/bin/env python3
"""scripts/launch.sh and examples/slurm.sbatch with programs that end as they are told, and an mpirun and srun that only start one process."""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "launch.sh"
STOPPED = 75
# Starts what follows the options once, as the launchers do, and hands SIGUSR1 on. Like Open MPI's it answers signals as before when
# that has ended, and takes a moment ($LINGER seconds) to end itself.
LAUNCHER = """#!/usr/bin/env python3
import os, signal, subprocess, sys, time
with open(os.environ["FOLDER"] + "/calls", "a") as calls:
    print(*sys.argv, file=calls)
child = None
before = signal.signal(signal.SIGUSR1, lambda *_: child and child.send_signal(signal.SIGUSR1))
child = subprocess.Popen([os.environ["FOLDER"] + "/program"], preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
code = child.wait()
signal.signal(signal.SIGUSR1, before)
time.sleep(float(os.environ.get("LINGER", "0")))
sys.exit(code if code >= 0 else 128 - code)
"""
# Ends with the codes of $CODES in turn; waits for a signal where it says so.
PROGRAM = """#!/usr/bin/env bash
echo start >> "$FOLDER/starts"
codes=($CODES)
code=${codes[$(($(wc -l < "$FOLDER/starts") - 1))]}
if [[ $code == wait ]]; then
  trap 'exit 75' USR1
  touch "$FOLDER/waiting"
  while :; do sleep 0.05; done
fi
exit $code
"""


class LaunchScriptTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        for name, text in (("mpirun", LAUNCHER), ("program", PROGRAM)):
            self.write(name, text)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def start(self, codes, *options, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        environment.update({"PATH": f"{self.folder}:/usr/bin:/bin", "FOLDER": str(self.folder), "CODES": codes,
                            "PARKA_RESTART_SECONDS": "0", **variables})
        return subprocess.Popen([shutil.which("bash"), str(SCRIPT), *options], env=environment, stderr=subprocess.PIPE, text=True)

    def launch(self, codes, *options, **variables):
        process = self.start(codes, *(options or ("-np", "2", "--", "run", "x")), **variables)
        _, errors = process.communicate(timeout=60)
        starts = self.folder / "starts"
        return process.returncode, len(starts.read_text().split()) if starts.exists() else 0, errors

    def test_a_good_run_starts_once(self):
        code, starts, errors = self.launch("0")
        self.assertEqual((code, starts), (0, 1), errors)
        self.assertIn("-np 2 --bind-to none env --ignore-signal=USR1 run x", (self.folder / "calls").read_text())

    def test_a_lost_run_starts_again(self):
        for codes in ("5 0", "6 0", "137 5 139 0", "6 5 0", "134 0"):
            with self.subTest(codes=codes):
                (self.folder / "starts").unlink(missing_ok=True)
                code, starts, errors = self.launch(codes)
                self.assertEqual((code, starts), (0, len(codes.split())), errors)
                self.assertIn("restart 1 of 3", errors)

    def test_a_launcher_that_is_asked_again_as_it_ends_keeps_its_code(self):
        process = self.start("wait", "-np", "2", "--", "run", LINGER="2.5")
        self.wait_for("waiting")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, STOPPED, errors)

    def test_restarts_have_an_end(self):
        code, starts, errors = self.launch("5 5 5 5 5 5")
        self.assertEqual((code, starts), (5, 4), errors)
        self.assertIn("given up after 3 restarts", errors)
        (self.folder / "starts").unlink()
        self.assertEqual(self.launch("137 0", "--restarts", "0", "--", "run")[:2], (137, 1))

    def test_what_would_not_go_better(self):
        for code in (1, 2, 3, 4):
            with self.subTest(code=code):
                (self.folder / "starts").unlink(missing_ok=True)
                self.assertEqual(self.launch(f"{code} 0")[:2], (code, 1))

    def test_a_signal_asks_to_save_and_stop(self):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            with self.subTest(signal=number.name):
                for name in ("starts", "waiting"):
                    (self.folder / name).unlink(missing_ok=True)
                process = self.start("wait 0", "-np", "2", "--", "run")
                self.wait_for("waiting")
                process.send_signal(number)
                _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, STOPPED, errors)
                self.assertIn(f"{number.name}: asking the run to save and stop", errors)
                self.assertIn("not done", errors)

    def test_a_signal_while_it_waits_to_start_again_ends_it(self):
        process = self.start("5 0", "-np", "2", "--", "run", PARKA_RESTART_SECONDS="60")
        for line in process.stderr:
            if "restart 1 of 3" in line:
                break
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        self.assertEqual((process.returncode, len((self.folder / "starts").read_text().split())), (STOPPED, 1), errors)
        self.assertLess(time.monotonic() - began, 30)
        self.assertIn("not started after SIGTERM", errors)

    def test_a_signal_is_repeated_until_the_run_answers(self):
        self.write("program", """#!/usr/bin/env bash
trap '' USR1
touch "$FOLDER/waiting"
while [[ ! -e $FOLDER/answers ]]; do sleep 0.05; done
trap 'exit 75' USR1
while :; do sleep 0.05; done
""")
        process = self.start("", "-np", "2", "--", "run")
        self.wait_for("waiting")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        (self.folder / "answers").touch()
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, STOPPED, errors)

    def test_a_signal_before_the_ranks_can_answer_stops_the_run(self):
        self.write("program", """#!/usr/bin/env bash
touch "$FOLDER/waiting"
while :; do sleep 0.05; done
""")
        process = self.start("", "-np", "2", "--", "run")
        self.wait_for("waiting")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, STOPPED, errors)
        self.assertIn("ended before it had begun, after SIGTERM", errors)

    def test_a_run_that_ends_as_it_is_asked_to_stop_keeps_its_code(self):
        self.write("run", f"#!{sys.executable}" + """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os._exit(int(os.environ["CODES"])))
open(os.environ["FOLDER"] + "/waiting", "w").close()
while True:
    signal.pause()
""")
        (self.folder / "mpirun").unlink()
        for tool in ("bash", "cat", "env", "grep", "setsid", "sleep"):
            (self.folder / tool).symlink_to(shutil.which(tool))
        for code in ("75", "0") * 10:  # one in twenty had another
            (self.folder / "waiting").unlink(missing_ok=True)
            process = self.start(code, "--", "run", PATH=str(self.folder))
            self.wait_for("waiting")
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
            self.assertEqual(process.returncode, int(code), errors)

    def wait_for(self, name):
        end = time.monotonic() + 30
        while not (self.folder / name).exists() and time.monotonic() < end:
            time.sleep(0.02)

    def test_a_stopped_run_is_not_done(self):
        code, starts, errors = self.launch(f"{STOPPED} 0")
        self.assertEqual((code, starts), (STOPPED, 1), errors)
        self.assertIn("saved and stopped, not done (exit code 75): the same command continues the run", errors)
        self.assertNotIn("launch.sh: done", errors)
        (self.folder / "starts").unlink()
        self.assertIn("launch.sh: done", self.launch("0", "--", "run")[2])

    def test_slurm(self):
        self.write("srun", LAUNCHER)
        code, starts, errors = self.launch("0", "-np", "16", "--gpus-per-task=1", "--", "run", SLURM_JOB_ID="7")
        self.assertEqual((code, starts), (0, 1), errors)
        self.assertIn("srun --kill-on-bad-exit=1 -n 16 --gpus-per-task=1 env --ignore-signal=USR1 run", (self.folder / "calls").read_text())
        self.launch("0", "--mpi=pmix", "--", "run", SLURM_JOB_ID="7")
        self.assertIn("srun --kill-on-bad-exit=1 --mpi=pmix env --ignore-signal=USR1 run", (self.folder / "calls").read_text())

    def test_without_a_launcher_the_program_starts_its_ranks(self):
        self.write("run", '#!/bin/bash\necho "$*" >> "$FOLDER/calls"\n')
        (self.folder / "mpirun").unlink()
        for tool in ("bash", "cat", "env", "grep", "setsid", "sleep"):
            (self.folder / tool).symlink_to(shutil.which(tool))
        code, _, errors = self.launch("0", "-np", "4", "--", "run", "train", PATH=str(self.folder))
        self.assertEqual((code, (self.folder / "calls").read_text()), (0, "train --ranks 4\n"), errors)
        code, _, errors = self.launch("0", "--hostfile", "hosts", "--", "run", PATH=str(self.folder))
        self.assertEqual(code, 2)
        self.assertIn("neither mpirun nor srun was found, which could take --hostfile hosts", errors)

    def submit(self, codes):
        """Runs the example as Slurm does the script of a job: its exit code, and what it asked of scontrol."""
        self.write("srun", LAUNCHER)
        self.write("scontrol", '#!/bin/sh\necho "$*" >> "$FOLDER/scontrol_calls"\n')
        for name in ("starts", "scontrol_calls"):
            (self.folder / name).unlink(missing_ok=True)
        environment = dict(os.environ, PATH=f"{self.folder}:/usr/bin:/bin", FOLDER=str(self.folder), CODES=codes, PARKA="run",
                           PARKA_RESTART_SECONDS="0", SLURM_JOB_ID="4711", SLURM_SUBMIT_DIR=str(ROOT))
        result = subprocess.run(["bash", str(ROOT / "examples" / "slurm.sbatch"), "config.json"], env=environment,
                                capture_output=True, text=True, timeout=60)
        asked = self.folder / "scontrol_calls"
        return result.returncode, asked.read_text().splitlines() if asked.exists() else []

    def test_a_stopped_job_goes_back_into_the_queue(self):
        self.assertEqual(self.submit(str(STOPPED)), (STOPPED, ["requeue 4711"]))
        self.assertEqual(self.submit(f"5 {STOPPED}"), (STOPPED, ["requeue 4711"]))
        for code in ("0", "2", "4"):
            self.assertEqual(self.submit(code), (int(code), []))
        self.assertIn("run train config.json", (self.folder / "calls").read_text())

    def test_the_job_is_told_to_stop_in_time_and_keeps_its_log(self):
        options = (ROOT / "examples" / "slurm.sbatch").read_text()
        for line in ("--signal=USR1@300", "--requeue", "--open-mode=append"):
            self.assertIn(f"#SBATCH {line}\n", options)

    def test_wrong_options(self):
        for options, message in ((("-np", "two", "--", "run"), "-np: expected a number, got 'two'"),
                                 (("-np", "2"), "nothing to start"), (("--",), "nothing to start")):
            with self.subTest(options=options):
                code, starts, errors = self.launch("0", *options)
                self.assertEqual((code, starts), (2, 0), errors)
                self.assertIn(message, errors)


if __name__ == "__main__":
    unittest.main()
