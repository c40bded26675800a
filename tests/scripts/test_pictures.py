"""Tests of scripts/image_data/pictures.py: pictures become the pixels that CLIP and SigLIP were trained on. Exits with 77
(skipped) where a package is missing."""

import os

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

import struct
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

try:
    import numpy as np
    from PIL import Image
except ImportError:
    print("skipped: numpy or Pillow is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from image_data.pictures import TOWERS, Fitting, PictureError, colour_of, pixels_of  # noqa: E402

CLIP_COLOUR = colour_of(TOWERS["clip"].mean)


def pattern(width, height):
    """Pixel (y, x, c) is (37 x + 91 y + 53 c + x y) mod 256."""
    y, x, c = np.ogrid[:height, :width, :3]
    return Image.fromarray(((37 * x + 91 * y + 53 * c + x * y) % 256).astype(np.uint8))


def crc(pixels):
    """CRC-32 of the RGB bytes of [3, H, W]."""
    return f"{zlib.crc32(np.ascontiguousarray(pixels.transpose(1, 2, 0))):08x}"


def png_of_16_bits():
    """An RGB PNG that Pillow cannot write and reads as 8 bits."""
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = zlib.compress(b"".join(b"\0" + bytes(4 * 6) for _ in range(4)))
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bmp_of_16_bits(red, green, blue, rows):
    """A BMP of 16 bits for each pixel, which Pillow cannot write: masks of the colours, and rows of pixels."""
    content = b"".join(struct.pack(f"<{len(row)}H", *row) + bytes(2 * len(row) % 4) for row in reversed(rows))
    masks = struct.pack("<III", red, green, blue)
    header = struct.pack("<IiiHHIIiiII", 40, len(rows[0]), len(rows), 1, 16, 3, len(content), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 66 + len(content), 0, 0, 66) + header + masks + content


class InFolder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def save(self, picture, name="picture.png", **options):
        picture.save(self.folder / name, **options)
        return self.folder / name

    def pixels(self, picture, geometry="stretch", size=28, name="picture.png"):
        return pixels_of(self.save(picture, name), Fitting(geometry, size, CLIP_COLOUR))


class Geometry(InFolder):
    def test_resized_pictures_have_known_bits(self):
        for (width, height), want, first, last in (
            ((50, 40), "44d85c32", (39, 102, 158), (112, 113, 166)),
            ((20, 31), "1a214c92", (4, 57, 115), (153, 208, 18)),
        ):
            with self.subTest(width=width):
                pixels = self.pixels(pattern(width, height))
                self.assertEqual((pixels.dtype, pixels.shape), (np.uint8, (3, 28, 28)))
                self.assertEqual(crc(pixels), want)
                self.assertEqual((tuple(pixels[:, 0, 0]), tuple(pixels[:, -1, -1])), (first, last))

    def test_a_crop_is_the_middle_of_the_picture_with_the_shorter_side_resized(self):
        wide = np.asarray(pattern(50, 40).resize((35, 28), Image.Resampling.BICUBIC))
        self.assertEqual(f"{zlib.crc32(wide.tobytes()):08x}", "b6504f6d")
        for picture, whole in ((pattern(50, 40), wide), (pattern(50, 40).transpose(Image.Transpose.ROTATE_90), None)):
            pixels = self.pixels(picture, "crop").transpose(1, 2, 0)
            if whole is None:
                whole = np.asarray(picture.resize((28, 35), Image.Resampling.BICUBIC))
                self.assertTrue((pixels == whole[3:31]).all())
            else:
                self.assertTrue((pixels == whole[:, 3:31]).all())

    def test_a_longer_side_is_rounded_down(self):
        picture = pattern(40, 53)  # 28 * 53 / 40 = 37.1
        whole = np.asarray(picture.resize((28, 37), Image.Resampling.BICUBIC))
        self.assertTrue((self.pixels(picture, "crop").transpose(1, 2, 0) == whole[4:32]).all())

    def test_padding_has_the_mean_colour_and_the_picture_in_its_middle(self):
        self.assertEqual(CLIP_COLOUR, (122, 116, 104))
        self.assertEqual(colour_of(TOWERS["siglip"].mean), (127, 127, 127))
        pixels = self.pixels(pattern(28, 11), "pad").transpose(1, 2, 0)  # nothing to resize
        self.assertTrue((pixels[8:19] == np.asarray(pattern(28, 11))).all())
        for rows in (pixels[:8], pixels[19:]):
            self.assertTrue((rows == CLIP_COLOUR).all())
        turned = self.pixels(pattern(11, 28), "pad").transpose(1, 2, 0)
        self.assertTrue((turned[:, 8:19] == np.asarray(pattern(11, 28))).all())
        self.assertTrue((turned[:, 19:] == CLIP_COLOUR).all())

    def test_a_square_is_the_same_in_every_geometry(self):
        kinds = [self.pixels(pattern(41, 41), geometry) for geometry in ("crop", "pad", "stretch")]
        self.assertTrue((kinds[0] == kinds[1]).all() and (kinds[1] == kinds[2]).all())

    def test_sides_that_differ_too_much_are_refused(self):
        self.pixels(pattern(200, 2), "crop")
        with self.assertRaisesRegex(PictureError, "is 201 x 2, a side more than 100 times the other"):
            self.pixels(pattern(201, 2), "crop")


class Transformers(InFolder):
    def test_pixels_are_those_of_the_processors_of_transformers(self):
        try:
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
            from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
            from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
        except ImportError:
            self.skipTest("transformers is missing")
        bytes_only = {"do_rescale": False, "do_normalize": False}
        side = {"height": 56, "width": 56}
        crop = {"size": {"shortest_edge": 56}, "crop_size": side, **bytes_only}
        processors = {
            "crop": CLIPImageProcessorPil(**crop),
            "pad": LlavaImageProcessorPil(do_pad=True, background_color=CLIP_COLOUR, **crop),
            "stretch": SiglipImageProcessorPil(size=side, resample=Image.Resampling.BICUBIC, **bytes_only),
        }
        random = np.random.default_rng(1)
        for width, height in ((56, 56), (57, 56), (31, 200), (200, 33), (101, 77), (5, 9), (640, 427)):
            picture = Image.fromarray(random.integers(0, 256, (height, width, 3)).astype(np.uint8))
            for geometry, processor in processors.items():
                with self.subTest(geometry=geometry, width=width):
                    want = processor(picture, return_tensors="np")["pixel_values"][0]
                    self.assertTrue((self.pixels(picture, geometry, 56) == want).all())


class Colours(InFolder):
    def test_transparency_is_dropped_without_blending(self):
        picture = pattern(28, 28)
        picture.putalpha(Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28)))
        self.assertEqual(picture.mode, "RGBA")
        self.assertTrue((self.pixels(picture).transpose(1, 2, 0) == np.asarray(pattern(28, 28))).all())
        grey = Image.merge("LA", (pattern(28, 28).getchannel(0), pattern(28, 28).getchannel(1)))
        self.assertTrue((self.pixels(grey) == np.asarray(pattern(28, 28))[:, :, 0]).all())

    def test_grey_and_bilevel_pictures_are_replicated(self):
        grey = pattern(28, 28).getchannel(1)
        self.assertTrue((self.pixels(grey) == np.asarray(grey)).all())
        bilevel = grey.point(lambda value: 255 * (value > 100)).convert("1", dither=Image.Dither.NONE)
        self.assertTrue((self.pixels(bilevel) == 255 * (np.asarray(grey) > 100)).all())

    def test_a_palette_is_expanded(self):
        indices = np.arange(784).reshape(28, 28).astype(np.uint8)
        colours = np.random.default_rng(1).integers(0, 256, (256, 3)).astype(np.uint8)
        picture = Image.fromarray(indices, "L")
        picture.putpalette(colours.tobytes())
        self.assertEqual(picture.mode, "P")
        for name in ("picture.png", "picture.gif"):
            self.assertTrue((self.pixels(picture, name=name).transpose(1, 2, 0) == colours[indices]).all())
        path = self.save(picture, transparency=bytes(range(256)))
        self.assertTrue((pixels_of(path, Fitting("stretch", 28, CLIP_COLOUR)).transpose(1, 2, 0) == colours[indices]).all())

    def test_16_bits_of_three_colours_are_expanded(self):
        black, white = (0, 0, 0), (255, 255, 255)
        for masks, grey, want in (((0xF800, 0x07E0, 0x001F), 0x8410, (131, 129, 131)), ((0x7C00, 0x03E0, 0x001F), 0x4210, (131, 131, 131))):
            with self.subTest(masks=masks):
                path = self.folder / "picture.bmp"
                path.write_bytes(bmp_of_16_bits(*masks, [[*masks], [sum(masks), 0, grey], [0, 0, 0]]))
                pixels = pixels_of(path, Fitting("stretch", 3, CLIP_COLOUR)).transpose(1, 2, 0)
                colours = [[(255, 0, 0), (0, 255, 0), (0, 0, 255)], [white, black, want], [black] * 3]
                self.assertEqual(pixels.tolist(), np.array(colours).tolist())

    def test_orientation_is_not_applied(self):
        exif = Image.Exif()
        exif[0x0112] = 6  # turned by a quarter
        path = self.save(pattern(50, 40), exif=exif)
        self.assertEqual(crc(pixels_of(path, Fitting("stretch", 28, CLIP_COLOUR))), "44d85c32")


class BadFiles(InFolder):
    def refuse(self, path, message):
        with self.assertRaisesRegex(PictureError, message) as caught:
            pixels_of(path, Fitting("crop", 28, CLIP_COLOUR))
        self.assertNotIn("\n", str(caught.exception))

    def write(self, name, content):
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def test_what_is_no_picture(self):
        self.refuse(self.folder / "none.png", "cannot be read .No such file")
        self.refuse(self.folder, "cannot be read .Is a directory")
        self.refuse(self.write("empty.jpg", b""), "is empty")
        self.refuse(self.write("text.jpg", b"<html>404</html>"), "is no picture of the formats PNG, JPEG")
        self.refuse(self.write("no_pixel.ppm", b"P6 0 4 255\n"), "is no picture of the formats")

    def test_a_file_cut_anywhere_is_refused(self):
        for name in ("a.png", "a.jpg", "a.webp", "a.bmp", "a.ppm"):
            whole = self.save(pattern(64, 64), name).read_bytes()
            for share in (0.2, 0.5, 0.9):
                with self.subTest(name=name, share=share):
                    self.refuse(self.write(name, whole[: int(len(whole) * share)]), "cannot be read|is no picture")

    def test_a_damaged_png_is_refused(self):
        whole = bytearray(self.save(pattern(64, 64)).read_bytes())
        whole[len(whole) // 2] ^= 16
        self.refuse(self.write("damaged.png", whole), "cannot be read")

    def test_colours_that_are_not_8_bit_rgb_are_refused(self):
        self.refuse(self.save(pattern(8, 8).convert("CMYK"), "a.jpg"), "has the colours CMYK")
        grey = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999)
        self.refuse(self.save(grey, "grey.png"), "has 16 bits for each colour")
        self.refuse(self.write("rgb.png", png_of_16_bits()), "has 16 bits for each colour")
        self.refuse(self.write("rgb.ppm", b"P6 2 2 65535\n" + bytes(24)), "has 16 bits for each colour")

    def test_pictures_with_more_pixels_than_memory_should_hold_are_refused(self):
        self.refuse(self.write("large.ppm", b"P6 20000 20000 255\n"), "has more than 89,478,485 pixels")
        long = self.write("long.ppm", b"P5 60000 700 255\n" + bytes(42_000_000))
        with self.assertRaisesRegex(PictureError, "is 60000 x 700, too large for a square around it"):
            pixels_of(long, Fitting("pad", 28, CLIP_COLOUR))


if __name__ == "__main__":
    unittest.main()
