#!/usr/bin/env python3
"""How ranks find each other, and what they say when they do not fit together. Exits with 77 (skipped) without
mpirun."""
import glob
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest
from threading import Thread

from ranks import PROGRAM, RanksTest, Run, starters

starters.skip_without_starter()
SPEAKERS = 3 if starters.STARTER == "variables" else 1  # of three ranks that fail alike


def alone(**variables):
    """The environment of a process that these variables tell how it was started."""
    return {**starters.environment(), **variables}


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []  # it has ended


def listened_on(pids):
    """Where these processes listen: "loopback", "network"."""
    inodes, found = set(), set()
    for pid in pids:
        for entry in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry)))
            except OSError:
                pass  # closed meanwhile
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as file:
            for words in map(str.split, file.readlines()[1:]):
                if words[3] == "0A" and words[9] in inodes:
                    found.add("loopback" if words[1].startswith(("0100007F:", "0" * 24 + "01000000:")) else "network")
    return found


def greet_nobody(listener):
    """Accepts connections and closes them, until the listener is closed."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def pretend(listener, said):
    """Answers as rank 0 would, without its secret, and notes what it was told."""
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            return
        connection.sendall(b"prove nonce proof\nwelcome\n")
        with connection, connection.makefile("rb") as told:
            said.append(told.read())


def connected(port):
    """A connection to a process that will listen there."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


class StartTest(RanksTest):
    def test_a_run_that_ends_well(self):
        run = Run(3, "drill", "steps=5")
        self.finish(run, 0)
        self.assertEqual(len(run.lines), 3, run.lines)  # the `ready` lines

    def test_one_process(self):
        result = subprocess.run([PROGRAM, "alone"], capture_output=True, text=True, env=alone(), timeout=60)
        self.assertEqual((result.returncode, result.stderr), (0, "rank 0 of 1\n"))

    @unittest.skipIf(starters.STARTER == "ranks", "ranks that one process starts have its version")
    def test_versions_differ(self):
        run = Run(3, "alone", "version2=1.1")
        self.finish(run, 2)
        self.assert_lines(run, r"^error: the version of parka of rank 2 \(.*\) differs from that of rank 0 \(.*\): "
                               r"1\.1, not 1\.0; install the same on all hosts$", SPEAKERS)
        self.assert_lines(run, "error: ", SPEAKERS)

    def test_configs_differ(self):
        run = Run(3, "drill", 'config1={\n  "lr": 0.002\n}')
        self.finish(run, 2)
        self.assert_lines(run, r'^error: the config of rank 1 .*: "lr": 0\.002, not "lr": 0\.001; give all', SPEAKERS)
        self.assert_lines(run, "error: ", SPEAKERS)

    def test_an_error_of_all_ranks_is_printed_once(self):
        """By each process where nobody may read the words of another one."""
        run = Run(3, "drill", "all_throw")
        self.finish(run, 2)
        self.assert_lines(run, "^error: nobody can read this$", SPEAKERS)
        self.assert_lines(run, "nobody can read this", SPEAKERS)

    def test_each_process_that_was_started_by_itself_says_why_it_ends(self):
        """Whether all ranks fail, or all but rank 0, or rank 0 is that of another run."""
        for case, wrong in (("all_throw", ()), ("throw=1", ()), ("config1=other", ()), ("", ("version1=2.0",))):
            with self.subTest(case or wrong):
                rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
                ranks = [subprocess.Popen([PROGRAM, "drill", "steps=9", *filter(None, (case,)), *wrong], stderr=subprocess.PIPE, text=True,
                                          env=alone(RANK=str(rank), **rendezvous)) for rank in range(2)]
                for rank in ranks:
                    self.addCleanup(rank.kill)
                for rank in ranks:
                    errors = rank.communicate(timeout=60)[1]
                    self.assertEqual((rank.returncode, errors.count("error: ")), (2, 1), errors)

    @unittest.skipIf(starters.STARTER == "mpirun", "mpirun hands on what has come, be it half a line")
    def test_lines_of_all_ranks_stay_whole(self):
        run = Run(4, "chatter")
        self.finish(run, 0)
        mixed = [line for line in run.lines if line not in (f"warning: {letter * 3000}" for letter in "abcd")]
        self.assertEqual((len(run.lines), len(mixed)), (800, 0))

    def test_ranks_that_do_not_come(self):
        """Each says whom it has waited for."""
        rendezvous = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        for rank, message in ((0, r"^error: of 3 ranks these have not come to rank 0, TCP port \d+, within 1 s: 1 2; "),
                              (2, r"^error: rank 2 of 3 cannot reach rank 0 at localhost, TCP port \d+, within 1 s: ")):
            result = subprocess.run([PROGRAM, "alone", "rendezvous_seconds=1"], capture_output=True, text=True, timeout=60,
                                    env=alone(RANK=str(rank), **rendezvous))
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertRegex(result.stderr, message)

    def test_a_start_says_for_whom_it_waits(self):
        """Soon, once, where and for how long."""
        rendezvous = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
        refusing = {**rendezvous, "RANK": "2", "MASTER_PORT": str(free_port())}
        with socket.create_server(("localhost", 0)) as closing, socket.create_server(("localhost", 0)) as silent:
            Thread(target=greet_nobody, args=(closing,), daemon=True).start()
            cases = {"missing ranks": ({**refusing, "RANK": "0", "MASTER_PORT": str(free_port())}, r"port {}\b.* 1 2:"),
                     "a name": ({**refusing, "MASTER_ADDR": "no host"}, r"rank 0 at no host, "),
                     "a port that refuses": (refusing, r"rank 0 at localhost, TCP port {} .*refused"),
                     "a port that something else answers": ({**refusing, "MASTER_PORT": str(closing.getsockname()[1])},
                                                            r"rank 0 at localhost, TCP port {} \(.*answers"),
                     "a port where nobody speaks": ({**refusing, "MASTER_PORT": str(silent.getsockname()[1])},
                                                    r"rank 0 at localhost, TCP port {} \(.*answers")}
            waiting = {case: subprocess.Popen([PROGRAM, "alone", "rendezvous_seconds=2", "notice_seconds=0.3"], stderr=subprocess.PIPE,
                                              text=True, env=alone(**variables)) for case, (variables, _) in cases.items()}
            for case, process in waiting.items():
                with self.subTest(case):
                    _, errors = process.communicate(timeout=60)
                    said, error = errors.splitlines()
                    variables, pattern = cases[case]
                    self.assertRegex(said, f"^rank {variables['RANK']} waits .*" + pattern.format(variables["MASTER_PORT"]))
                    self.assertRegex(said, " 2 s$")
                    self.assertTrue(error.startswith("error: "), errors)
                    self.assertEqual(process.returncode, 2)

    def test_a_rank_that_hangs_once_it_has_come(self):
        """The others end, and name it: there is no watchdog yet."""
        port = free_port()
        with subprocess.Popen([PROGRAM, "alone", "agreement_seconds=1", "notice_seconds=0.3"], stderr=subprocess.PIPE, text=True,
                              env=alone(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))) as rank, \
                connected(port) as hanging:
            hanging.sendall(b"parka///2 1\n")
            _, errors = rank.communicate(timeout=60)
        said, error = errors.splitlines()
        self.assertRegex(said, r"^rank 0 waits for word from rank 1 at \S+: .* 1 s$")
        self.assertRegex(error, r"^error: rank 1 at \S+ has said nothing for 1 s ")
        self.assertEqual(rank.returncode, 5)

    def test_rank_0_that_hangs_once_others_have_come(self):
        with socket.create_server(("localhost", 0)) as rank_0:
            rendezvous = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(rank_0.getsockname()[1])}
            with subprocess.Popen([PROGRAM, "alone", "rendezvous_seconds=0.5", "agreement_seconds=0.5", "notice_seconds=0.3"],
                                  stderr=subprocess.PIPE, text=True, env=alone(**rendezvous)) as rank:
                connection, _ = rank_0.accept()
                connection.recv(100)
                connection.sendall(b"welcome\n")
                _, errors = rank.communicate(timeout=60)
        self.assertRegex(errors.splitlines()[-1], r"^error: rank 0 at \S+ has said nothing for 1 s ")
        self.assertEqual(rank.returncode, 5)

    def test_a_second_process_of_a_rank(self):
        """It is refused by name, and the run goes on without it. One whose process has ended may come again."""
        port = free_port()
        rendezvous = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}

        def start(rank):
            process = subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(RANK=str(rank), **rendezvous))
            self.addCleanup(process.kill)
            return process

        ranks = [start(0)]
        for _ in range(2):
            with connected(port) as first:
                first.sendall(b"parka///3 1\n")
                self.assertEqual(first.recv(100), b"welcome\n")
                second = start(1)
                _, errors = second.communicate(timeout=60)
                self.assertRegex(errors, "^error: rank 0 has .* another rank 1: ")
                self.assertEqual(second.returncode, 2)
        ranks += [start(1), start(2)]
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, errors)
            self.assertEqual("a second process came as rank 1" in errors, rank == 0, errors)

    def test_ranks_of_one_process_listen_on_this_host_alone(self):
        """And nobody listens any more once all are there, nor do ranks that have come over a network."""
        run = subprocess.Popen([PROGRAM, "alone", "--ranks=2", "stopped=1"], stderr=subprocess.DEVNULL, env=alone())
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        while not (len(ranks := children_of(run.pid)) == 2 and (found := listened_on(ranks))):
            self.assertIsNone(run.poll())
            time.sleep(0.02)
        self.assertEqual(found, {"loopback"})
        time.sleep(0.1)  # rank 1 has stopped by now
        os.kill(int(ranks[1]), signal.SIGCONT)
        self.assertEqual(run.wait(60), 0)
        rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        for started in ({}, {**rendezvous, "WORLD_SIZE": "2"}):
            runs = [subprocess.Popen([PROGRAM, "drill", "--ranks=2"], stderr=subprocess.PIPE, text=True, env=alone(**started))]
            if started:
                runs.append(subprocess.Popen([PROGRAM, "drill", "--ranks=2"], stderr=subprocess.PIPE, text=True,
                                             env=alone(**{**started, "RANK": "1"})))
            for process in runs:
                self.addCleanup(process.kill)
            ready = [process.stderr.readline().split() for process in runs for _ in range(2)]
            self.assertEqual([words[0] for words in ready], ["ready"] * len(ready))
            self.assertEqual(listened_on([int(words[2]) for words in ready]), set())
            for process in runs:
                process.kill()
                process.communicate()

    def test_too_few_descriptors_for_the_others(self):
        """Nobody waits for connections that cannot be made."""
        for limit in (4, 5):
            with self.subTest(limit):
                result = subprocess.run(["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"', PROGRAM, "alone", "--ranks=3"],
                                        capture_output=True, text=True, timeout=30, env=alone())
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn("ulimit -Hn", result.stderr)

    def test_an_address_that_nobody_knows(self):
        rendezvous = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no host", "MASTER_PORT": "29500"}
        result = subprocess.run([PROGRAM, "alone", "rendezvous_seconds=1"], capture_output=True, text=True, timeout=60,
                                env=alone(**rendezvous))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, r"^error: rank 1 of 2 cannot find rank 0 at no host: .+, for 1 s; name rank 0's host ")

    def test_a_stranger_is_no_rank(self):
        """Who comes to rank 0's port without the word of this run is sent away."""
        port = free_port()
        rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        ranks = [subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(RANK="0", **rendezvous))]
        self.addCleanup(ranks[0].kill)
        for greeting in (b"GET / HTTP/1.1\n", b"parka/// 1\n"):
            with connected(port) as stranger:
                stranger.sendall(greeting)
                self.assertEqual(stranger.recv(100), b"")
        ranks.append(subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(RANK="1", **rendezvous)))
        for number, rank in enumerate(ranks):
            _, errors = rank.communicate(timeout=60)
            self.assertEqual((rank.returncode, errors), (0, f"rank {number} of 2\n"))

    def test_ranks_that_have_a_secret(self):
        """It does not travel, and who does not know it takes no rank's place, nor is taken for rank 0."""
        with tempfile.TemporaryDirectory() as folder:
            secret = os.path.join(folder, "secret")
            with open(secret, "w", encoding="ascii") as file:
                file.write("0123456789abcdef\n")
            os.chmod(secret, 0o600)
            port = free_port()
            rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            first = subprocess.run([PROGRAM, "alone", "rendezvous_seconds=0.1"], stderr=subprocess.PIPE, text=True, timeout=60,
                                   env=alone(RANK="1", **rendezvous, PARKA_RENDEZVOUS_SECRET_FILE=secret))
            if "without libsodium" in first.stderr:
                self.skipTest("built without libsodium")

            def start(rank, *options, **variables):
                process = subprocess.Popen([PROGRAM, "alone", *options], stderr=subprocess.PIPE, text=True,
                                           env=alone(RANK=str(rank), **rendezvous, **variables))
                self.addCleanup(process.kill)
                return process

            with self.subTest("strangers"):
                rank_0 = start(0, PARKA_RENDEZVOUS_SECRET_FILE=secret)
                for greeting in (b"parka///2 1\n", b"parka///2 1 nonce\nproof\n"):
                    with connected(port) as stranger:
                        stranger.sendall(greeting)
                        answers = stranger.makefile("rb").read()
                        self.assertNotIn(b"welcome", answers)
                        self.assertNotIn(b"0123456789abcdef", answers)
                # The proof of rank 0 does for no other rank, nor a second time.
                with connected(port) as stranger:
                    stranger.sendall(b"parka///2 1 nonce\n")
                    answer = stranger.makefile("rb").readline().split()
                    stranger.sendall(answer[2] + b"\n")
                    self.assertEqual(stranger.recv(100), b"")
                without = start(1, "rendezvous_seconds=0.5", "notice_seconds=9")
                self.assertIn("PARKA_RENDEZVOUS_SECRET", without.communicate(timeout=60)[1])
                self.assertEqual(without.returncode, 2)
                other = os.path.join(folder, "other")
                with open(other, "w", encoding="ascii") as file:
                    file.write("another secret of ours")
                wrong = start(1, "rendezvous_seconds=0.5", "notice_seconds=9", PARKA_RENDEZVOUS_SECRET_FILE=other)
                self.assertIn("PARKA_RENDEZVOUS_SECRET", wrong.communicate(timeout=60)[1])
                self.assertEqual(wrong.returncode, 2)
                rank_1 = start(1, PARKA_RENDEZVOUS_SECRET="0123456789abcdef")
                for number, rank in enumerate((rank_0, rank_1)):
                    self.assertEqual((rank.communicate(timeout=60)[1], rank.returncode), (f"rank {number} of 2\n", 0))
            with self.subTest("a false rank 0"), socket.create_server(("localhost", port)) as false:
                said = []
                Thread(target=pretend, args=(false, said), daemon=True).start()
                rank_1 = start(1, "rendezvous_seconds=0.5", "notice_seconds=9", PARKA_RENDEZVOUS_SECRET_FILE=secret)
                self.assertIn("PARKA_RENDEZVOUS_SECRET", rank_1.communicate(timeout=60)[1])
                self.assertEqual(rank_1.returncode, 2)
                for lines in said:
                    self.assertNotIn(b"0123456789abcdef", lines)
                    self.assertEqual(lines.count(b"\n"), 1, lines)
            for given in ({"PARKA_RENDEZVOUS_SECRET": "short"}, {"PARKA_RENDEZVOUS_SECRET": 16 * "x", "PARKA_RENDEZVOUS_SECRET_FILE": secret}):
                with self.subTest(given):
                    refused = start(1, **given)
                    self.assertIn("PARKA_RENDEZVOUS_SECRET", refused.communicate(timeout=60)[1])
                    self.assertEqual(refused.returncode, 2)
            for wrong in ({"PARKA_RENDEZVOUS_SECRET": secret}, {"PARKA_RENDEZVOUS_SECRET": "/no/such/folder/secret"}, {"PARKA_RENDEZVOUS_SECRET": "~/.parka/our-secret"},
                          {"PARKA_RENDEZVOUS_SECRET": os.path.relpath(secret)}, {"PARKA_RENDEZVOUS_SECRETFILE": secret}, {"PARKA_SECRET_FILE": secret},
                          {"PARKA_RENDEZVOUS_TOKEN": 16 * "x"}, {"PARKA_SECRET": 16 * "x"}):
                with self.subTest(wrong):
                    refused = start(0, "rendezvous_seconds=0.5", **wrong)
                    errors = refused.communicate(timeout=60)[1]
                    self.assertEqual((refused.returncode, len(errors.splitlines())), (2, 1), errors)
                    self.assertIn(next(iter(wrong)), errors)
                    self.assertIn("PARKA_RENDEZVOUS_SECRET_FILE", errors)
            for mode, is_told in ((0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1)):
                with self.subTest(oct(mode)):
                    os.chmod(secret, mode)
                    waiting = start(0, "rendezvous_seconds=0.5", "--ranks=2", PARKA_RENDEZVOUS_SECRET_FILE=secret)
                    self.assertEqual(waiting.communicate(timeout=60)[1].count("warning: PARKA_RENDEZVOUS_SECRET_FILE"), is_told)
            short = os.path.join(folder, "short")
            with open(short, "w", encoding="ascii") as file:
                file.write("short\n")
            for path in (folder, short, os.path.join(folder, "none"), "/dev/zero"):
                with self.subTest(path):
                    refused = start(1, PARKA_RENDEZVOUS_SECRET_FILE=path)
                    self.assertIn(path, refused.communicate(timeout=60)[1])
                    self.assertEqual(refused.returncode, 2)

    def test_ranks_that_slurm_starts(self):
        """They find each other by what srun tells them."""
        step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "1",
                "SLURM_STEP_NODELIST": "localhost,other[1-2]"}
        ranks = [subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(SLURM_PROCID=str(rank), **step))
                 for rank in range(3)]
        for number, rank in enumerate(ranks):
            _, errors = rank.communicate(timeout=120)
            self.assertEqual((rank.returncode, errors), (0, f"rank {number} of 3\n"))

    def test_each_process_of_a_launcher_becomes_several_ranks(self):
        """As on two hosts whose launcher starts one process on each."""
        for starter in filter(starters.is_available, ("variables", "mpirun")):
            with self.subTest(starter):
                result = starters.run(2, [PROGRAM, "collectives", "--ranks=2"], starter)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(result.stdout, "4 ranks over TCP\n")


if __name__ == "__main__":
    unittest.main()
