"""Raw token files whose ids have another width than data.token_dtype says: they are refused, or a warning names them, wherever they
are given. Files that merely look odd are trained on."""
import unittest

from parka_runs import parka
from refusals import assert_refused_or_told
from token_runs import BATCH, SEQUENCE, TokenRuns, np, random_ids

DTYPE_KEY = "data.token_dtype"
DTYPE_OF_FILES = (DTYPE_KEY, "--dtype")  # `parka data FILES` has no config
NO_SUCH_DTYPE = (*DTYPE_OF_FILES, "64")  # no value of the key reads ids of 64 bits
COUNT = 40 * SEQUENCE


class Widths(TokenRuns):
    def refuse_everywhere(self, path, vocab, good, remedy=DTYPE_OF_FILES, **data):
        """As training data, as held-out data, as a set, in `parka data` of the config."""
        name = path.rsplit("/", 1)[1]
        sets = {"sets": [f"held={path}"]}
        for where, config in (
            ("data.train", self.config([path], vocab, **data)),
            ("second of data.train", self.config([good, path], vocab, **data)),
            ("data.eval", self.config([good], vocab, eval=[path], **data)),
            ("evaluation.sets", {**self.config([good], vocab, **data), "evaluation": sets}),
        ):
            with self.subTest(where=where, file=name):
                self.forget_run()
                self.assert_not_trained_or_told(self.train(config), name, remedy)
                assert_refused_or_told(self, parka("data", self.write_config(config)), name, remedy)

    def llm_c_file(self, vocab):
        """Its header says how wide its ids are, whatever the key says."""
        header = np.zeros(256, "<i4")
        header[:3] = 20240801, 7, COUNT
        return self.write("good.bin", header.tobytes() + random_ids(COUNT, vocab, "<u4").tobytes())

    def test_uint32_ids_of_a_large_vocabulary_read_as_uint16(self):
        for name, vocab in (("llama3.npy", 128256), ("qwen.bin", 151936), ("olmo2.npy", 100352), ("just_above.npy", 65552)):
            path = self.write(name, random_ids(COUNT, vocab, "<u4"))
            with self.subTest(name):
                self.forget_run()
                self.assert_not_trained(self.train(self.config([path], vocab)), name, DTYPE_KEY)
                assert_refused_or_told(self, parka("config", "check", self.path("config.json")), name, DTYPE_KEY)

    def test_uint32_ids_of_a_large_vocabulary_are_named_everywhere(self):
        path = self.write("wide.npy", random_ids(COUNT, 128256, "<u4"))
        self.refuse_everywhere(path, 128256, self.llm_c_file(128256))

    def test_uint32_ids_of_a_small_vocabulary_read_as_uint16(self):
        good = self.write("good.npy", random_ids(COUNT, 50304))
        for name, vocab in (("gpt2.npy", 50304), ("letters.bin", 66), ("bytes.npy", 257)):
            path = self.write(name, random_ids(COUNT, vocab, "<u4"))
            with self.subTest(name):
                self.forget_run()
                self.assert_not_trained_or_told(self.train(self.config([path], vocab)), name, DTYPE_KEY)
        self.refuse_everywhere(path, 50304, good)

    def test_ids_with_the_upper_byte_first(self):
        good = self.write("good.npy", random_ids(COUNT, 50304))
        for name, vocab in (("letters.bin", 66), ("bytes.npy", 257), ("small.npy", 1000)):
            path = self.write(name, random_ids(COUNT, vocab, ">u2"))
            with self.subTest(name):
                self.forget_run()
                self.assert_not_trained(self.train(self.config([path], 65536)), name, "<u2")
        text = self.write("text.npy", ("\ufeff" + "Some words of a plain text, and others.\n" * 60 + "\u201cend\u201d").encode("utf-16-be"))
        self.refuse_everywhere(text, 65536, good, "<u2")

    def test_ids_that_are_multiples_of_256_by_chance_are_trained_on(self):
        few = self.write("few.npy", np.array([0, 256, 512, 2048], "<u2")[random_ids(COUNT, 4)])
        rare = self.write("rare.npy", np.where(random_ids(COUNT, 20) == 1, 7, random_ids(COUNT, 200, seed=1) * 256).astype("<u2"))
        for path in (few, rare):
            self.assertEqual(self.train(self.config([path], 65536)).returncode, 0)
            self.forget_run()

    def test_int64_ids_read_as_uint16(self):
        """Three of four ids are 0."""
        path = self.write("long.npy", random_ids(COUNT, 50304, "<i8"))
        good = self.write("good.npy", random_ids(COUNT, 50304))
        self.refuse_everywhere(path, 50304, good, NO_SUCH_DTYPE)

    def test_int64_ids_read_as_uint32(self):
        """Every second id is 0, and the vocabulary is large enough for none of them to be beyond it."""
        good = self.write("good.npy", random_ids(COUNT, 128256, "<u4"))
        path = self.write("long.npy", random_ids(COUNT, 128256, "<i8"))
        self.refuse_everywhere(path, 128256, good, NO_SUCH_DTYPE, token_dtype="uint32")
        small = self.write("long_of_few.bin", random_ids(COUNT, 50304, "<i8"))
        self.forget_run()
        self.assert_not_trained_or_told(self.train(self.config([small], 50304, token_dtype="uint32")), "long_of_few.bin",
                                        NO_SUCH_DTYPE)

    def test_the_data_command_without_a_config(self):
        for name, ids, option in (("few.npy", random_ids(COUNT, 50304, "<u4"), "uint16"), ("long.npy", random_ids(COUNT, 128256, "<i8"), "uint32"),
                                  ("long_of_few.npy", random_ids(COUNT, 256, "<i8"), "uint16")):
            path = self.write(name, ids)
            with self.subTest(name):
                assert_refused_or_told(self, parka("data", path, "--dtype", option), name, NO_SUCH_DTYPE)

    def test_ids_of_the_right_width_are_trained_on(self):
        often_zero = random_ids(COUNT, 50304)
        often_zero[np.random.default_rng(1).random(COUNT) < 0.6] = 0
        padded = random_ids(COUNT, 50304)
        padded[COUNT // 10:] = 0  # mostly padding
        in_turn = random_ids(COUNT, 50304)
        in_turn[::3] = 0
        few_of_many = random_ids(COUNT, 300, "<u4")  # of a large vocabulary, as of a text in one script
        for name, ids, vocab, dtype in (
            ("often_zero.npy", often_zero, 50304, "uint16"), ("padded.npy", padded, 50304, "uint16"), ("in_turn.npy", in_turn, 50304, "uint16"),
            ("few_of_many.npy", few_of_many, 128256, "uint32"), ("up_to_the_last.npy", random_ids(COUNT, 65536), 65536, "uint16"),
            ("zeros_of_uint32.npy", often_zero.astype("<u4"), 128256, "uint32"),
        ):
            path = self.write(name, ids)
            with self.subTest(name):
                self.assertEqual(self.targets_of_first_step(self.config([path], vocab, token_dtype=dtype)), BATCH * (SEQUENCE - 1))
                (said,) = self.data_of(path, "--dtype", dtype)
                self.assertEqual((said["token_dtype"], said["tokens"]), (dtype, COUNT))


if __name__ == "__main__":
    unittest.main()
