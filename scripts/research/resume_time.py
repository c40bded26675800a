#!/usr/bin/env python3
"""Measures how long a training needs to resume from its newest checkpoint, beside what the disk needs to read it.

    scripts/research/checkpoint_cost.py PARKA CONFIG --folder RUNS --json COST       leaves a checkpoint in RUNS/with
    scripts/research/resume_time.py PARKA CONFIG --name 7b --folder RUNS --json OUT

    resume.NAME.seconds    from the start of the program to the end of its first step, without a step's own time and
                           without the time that the disk alone needs for the files

Before each of the two the checkpoint's files leave the page cache: file by file, or where that does not help with all else,
by /proc/sys/vm/drop_caches. Give the same --set as to the run that made the checkpoint. --make trains one step and saves
first."""
import concurrent.futures
import contextlib
import os
import shutil
import statistics
import time
from datetime import datetime
from pathlib import Path

from measured_runs import (RunParser, checkpoints, shared_options, fail, positive, records, require_success,
                           resolved_config, run_main, train, training, wall_seconds_of_steps, write_report)

CHUNK, BLOCK, PAGE = 256 << 20, 8 << 20, 4096  # bytes of a task of a thread, of a read, of what the page cache holds
FURTHER_STEPS = 4  # after the first: of these the median is taken


def files_of(checkpoint):
    return sorted(path for path in checkpoint.iterdir() if path.is_file())


def cached_share(files):
    """Of 1000 pages of the files, spread evenly: the share that is in memory. None where the file system does not tell."""
    total = sum(path.stat().st_size for path in files)
    pages = cached = 0
    for path in files:
        size = path.stat().st_size
        with open(path, "rb") as file:
            for place in range(0, size, max(PAGE, total // 1000)):
                try:
                    cached += os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT) == 1
                except BlockingIOError:
                    pass
                except OSError:
                    return None
                pages += 1
    return cached / max(pages, 1)


def empty_cache(files):
    """Returns the share of the files that is still in memory, as cached_share()."""
    os.sync()  # what is not on disk yet would stay
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached_share(files)
    if share is not None and share < 0.01:
        return share
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    return cached_share(files)


def read_chunk(path, begin):
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        for place in range(begin, min(begin + CHUNK, path.stat().st_size), BLOCK):
            os.preadv(file.fileno(), [buffer], place)


def disk_seconds(files, threads):
    """Of reading all files once."""
    tasks = [(path, begin) for path in files for begin in range(0, path.stat().st_size, CHUNK)]
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for task in [pool.submit(read_chunk, *task) for task in tasks]:
            task.result()
    return time.monotonic() - begun


def newest(folder):
    """Run folder, step and path of the newest checkpoint of RUNS/with or of RUNS."""
    for run_folder in (folder / "with", folder):
        complete = checkpoints(run_folder)
        if complete:
            return run_folder, max(complete), complete[max(complete)]
    return fail(f"{folder}: has no complete checkpoint; run checkpoint_cost.py into it first, or give --make")


def resume(arguments, sets, run_folder, step):
    """Seconds from the start of the program to the end of the first step, and of a median step."""
    log = arguments.folder / "resume.log"
    last = step + 1 + FURTHER_STEPS
    sets = [*sets, f"checkpoint.folder={run_folder}", "checkpoint.interval=0", "checkpoint.save_final=false",
            f"training.steps={last}"]
    started = time.time()
    with training(arguments, sets, log) as process:
        require_success(process.wait(), log)
    train_records = records(run_folder)
    if [record["step"] for record in train_records] != list(range(step + 1, last + 1)):
        fail(f"{run_folder}: the run did not go on from step {step}; see {log}", 1)
    further = wall_seconds_of_steps(train_records)
    # The program's own clock starts once it is loaded; the time of the record tells of all.
    return datetime.fromisoformat(train_records[0]["time"]).timestamp() - started, statistics.median(further.values())


def read_arguments():
    parser = RunParser(__doc__)
    parser.add_argument("--name", default="model", help="name of the model in the figure")
    parser.add_argument("--folder", type=Path, required=True, metavar="RUNS")
    parser.add_argument("--make", action="store_true", help="train one step into RUNS/with and save first")
    parser.add_argument("--reading-threads", type=positive, default=16, help="threads of the disk measurement (default 16)")
    return parser.parse_args()


def main():
    arguments = read_arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    sets = shared_options(resolved_config(arguments), arguments.folder, 1)
    if arguments.make:
        made = arguments.folder.resolve() / "with"
        shutil.rmtree(made, ignore_errors=True)
        train(arguments, [*sets, f"checkpoint.folder={made}", "training.steps=1", "checkpoint.save_final=true"],
              arguments.folder / "make.log")
    run_folder, step, checkpoint = newest(arguments.folder.resolve())
    files = files_of(checkpoint)
    total = sum(path.stat().st_size for path in files)
    shares = [empty_cache(files)]
    of_disk = disk_seconds(files, arguments.reading_threads)
    shares.append(empty_cache(files))
    to_first_step, of_step = resume(arguments, sets, run_folder, step)
    in_memory = " and ".join("?" if share is None else f"{100 * share:.1f} %" for share in shares)
    print(f"{total / 1e9:.2f} GB; the disk alone: {of_disk:.2f} s, {total / 1e9 / of_disk:.2f} GB/s; "
          f"before it and before the start {in_memory} of the files were in memory")
    print(f"from start to the end of the first step: {to_first_step:.2f} s; a median step: {of_step:.3f} s")
    write_report(arguments, {f"resume.{arguments.name}.seconds": to_first_step - of_step - of_disk},
                 {"step": step, "bytes": total, "disk_seconds": of_disk, "seconds_to_first_step": to_first_step,
                  "median_step_seconds": of_step, "cached_shares": shares})


if __name__ == "__main__":
    run_main(main)
