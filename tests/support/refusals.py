"""What tests of bad input say of a command that ran: it was refused in one line, or it warned. A failure shows the command and all
that it said."""
import re
import shlex

# What a clone without Git LFS has in place of a large file.
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"8badf00d" * 8 + b"\nsize 4976698672\n"
FETCH_IT = "git lfs pull"
BAD_INPUT = 2


def shown(result):
    """The command of a subprocess.CompletedProcess and its output, for the message of an assertion."""
    command = result.args if isinstance(result.args, str) else shlex.join(map(str, result.args))
    return f"\n$ {command}\nexit code {result.returncode}\n--- stdout\n{result.stdout[-2000:]}\n--- stderr\n{result.stderr[-4000:]}"


def has(text, word):
    """Of a tuple any word is enough."""
    return any(one in text for one in word) if isinstance(word, tuple) else word in text


def error_lines(result):
    return [line for line in result.stderr.splitlines() if re.match(r"[\w.]+: error: ", line)]


def assert_refused(test, result, *words, code=BAD_INPUT):
    """The command ended with this exit code, and its last line is its only error, which holds the words. Returns that line."""
    test.assertEqual(result.returncode, code, shown(result))
    test.assertNotIn("Traceback", result.stderr, shown(result))
    errors = error_lines(result)
    test.assertEqual(len(errors), 1, "lines that are an error" + shown(result))
    test.assertEqual(result.stderr.splitlines()[-1], errors[0], "the error is not the last line" + shown(result))
    for word in words:
        test.assertTrue(has(errors[0], word), f"the error does not hold {word!r}" + shown(result))
    return errors[0]


def assert_ended_well(test, result):
    test.assertEqual(result.returncode, 0, shown(result))
    test.assertEqual(error_lines(result), [], shown(result))


def assert_told(test, result, *words):
    """The command went on, and a line of it that holds the words says that it is a warning."""
    assert_ended_well(test, result)
    lines = [line for line in result.stderr.splitlines() if all(has(line, word) for word in words)]
    test.assertTrue(lines, f"no line holds {words}" + shown(result))
    test.assertTrue(any("warning" in line.lower() for line in lines), f"no line with {words} says 'warning'" + shown(result))


def assert_refused_or_told(test, result, place, *remedies):
    """For what may be meant, however seldom: refused with one of the remedies, or warned of with a line for each."""
    if result.returncode != 0:
        assert_refused(test, result, place, tuple(one for word in remedies for one in (word if isinstance(word, tuple) else (word,))))
        return
    for remedy in remedies:
        assert_told(test, result, place, remedy)
