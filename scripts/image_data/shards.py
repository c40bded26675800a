"""Makes files of pixels of many pictures, in processes, and finds those again that a stopped run has made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from text_data.common import InputError, real_path
from text_data.parts import Progress, finish_part, make_parts, time_left

from .files import VERSION, PixelsWriter, shard_name
from .pictures import Fitting, PictureError, pixels_of

# Pictures of a file of pixels: no more than these, and no more than fit in so many bytes.
SHARD_PICTURES, SHARD_BYTES = 4096, 2**30


@dataclass(frozen=True)
class PictureFile:
    path: Path
    size: int  # -1 where there is none
    changed: int  # modification time in nanoseconds


class PictureProgress(Progress):
    """Counts pictures in the place of bytes."""

    def line(self, total: int, seconds: float) -> str:
        done = self.bytes_read.value
        rate = f"{done / seconds:,.0f} images/s, {time_left(done, total, seconds)}"
        return f"{100 * done / max(total, 1):.1f} % of {total:,} images, {rate}"


class ShardMaker:
    """Makes KEY.pixels of a group of pictures in a folder, and KEY.npz, whose presence says that it is complete:

    places     int32 [pictures]: each one's place in the file, -1 for those that cannot be used
    checksums  uint64 [pictures]
    errors     why those cannot be used, empty for the others
    """

    def __init__(self, settings: Fitting, folder: Path, progress: Progress):
        self.settings, self.folder, self.progress = settings, folder, progress

    def path(self, index: int, group: list[PictureFile]) -> Path:
        files = [(str(real_path(file.path)), file.size, file.changed) for file in group]
        known = json.dumps([VERSION, asdict(self.settings), index, files])
        return self.folder / f"pixels-{index:05d}-{hashlib.blake2b(known.encode(), digest_size=12).hexdigest()}"

    def forget_mended(self, index: int, group: list[PictureFile]) -> int:
        """Returns how many pictures of a part could not be used. Lets the part be made again if one of them is not bad for the
        same reason any more: rights and disks get better without a change of the file."""
        complete = self.path(index, group).with_suffix(".npz")
        if not complete.exists():
            return 0
        with np.load(complete) as stored:
            reasons = stored["errors"].tolist()
        if any(reason and self._read(picture)[1] != reason for picture, reason in zip(group, reasons)):
            complete.unlink()
        return sum(bool(reason) for reason in reasons)

    def _read(self, picture: PictureFile) -> tuple[np.ndarray | None, str]:
        """Its pixels, or why it cannot be used."""
        try:
            return pixels_of(picture.path, self.settings), ""
        except PictureError as error:
            return None, str(error)

    def make(self, index: int, group: list[PictureFile]) -> None:
        path = self.path(index, group)
        places, checksums, errors = [], [], []
        with open(path.with_suffix(".pixels"), "wb") as file:
            writer = PixelsWriter(file, self.settings.size)
            for picture in group:
                pixels, reason = self._read(picture)
                place, checksum = (-1, 0) if pixels is None else writer.write(pixels)
                places.append(place)
                checksums.append(checksum)
                errors.append(reason)
                self.progress.add(1, 0)
            writer.finish()
        finish_part(path, places=np.array(places, np.int32), checksums=np.array(checksums, np.uint64), errors=np.array(errors))


def stat_picture(path: Path) -> PictureFile:
    try:
        status = path.stat()
    except OSError:
        return PictureFile(path, -1, 0)  # reading it will say why
    return PictureFile(path, status.st_size, status.st_mtime_ns)


def groups_of_pictures(pictures: list[PictureFile], size: int) -> list[list[PictureFile]]:
    count = max(1, min(SHARD_PICTURES, SHARD_BYTES // (3 * size * size)))
    return [pictures[first : first + count] for first in range(0, len(pictures), count)]


@dataclass(frozen=True)
class Images:
    """All pictures by number: where their pixels are."""

    shards: np.ndarray  # uint32 [pictures]: which file of pixels
    places: np.ndarray  # int32 [pictures]: where in that; -1 for those that cannot be used
    checksums: np.ndarray  # uint64 [pictures]
    errors: list[str]  # why a picture cannot be used, or empty
    paths: list[Path]  # of the files of pixels, without a suffix

    def move_to(self, folder: Path) -> list[str]:
        """Moves the files of pixels to where they stay, and returns their names there."""
        names = []
        for number, path in enumerate(self.paths):
            names.append(shard_name(number))
            path.with_suffix(".npz").unlink()  # first, because it says that the other is there
            path.with_suffix(".pixels").rename(folder / names[-1])
        return names


def make_images(maker: ShardMaker, groups: list[list[PictureFile]], workers: int, skip_bad: bool) -> Images:
    """Without `skip_bad`, raises InputError for the first picture that cannot be used."""
    paths, sizes, places, checksums, errors = [], [], [np.zeros(0, np.int32)], [np.zeros(0, np.uint64)], []
    for group, path in zip(groups, make_parts(maker, groups, workers)):
        with np.load(path.with_suffix(".npz")) as stored:
            places.append(stored["places"])
            checksums.append(stored["checksums"])
            reasons = stored["errors"].tolist()
        bad = next(((p.path, reason) for p, reason in zip(group, reasons) if reason), None)
        if bad is not None and not skip_bad:
            raise InputError(f"{bad[0]}: {bad[1]}; fix it, or leave out the samples of bad images with --skip-bad")
        paths.append(path)
        sizes.append(len(reasons))
        errors += reasons
    shards = np.repeat(np.arange(len(paths), dtype=np.uint32), sizes)
    return Images(shards, np.concatenate(places), np.concatenate(checksums), errors, paths)
