"""Where parka follow sends a run's records: each module has a class with these methods.

begin()         forget all records: the first of the run follow, or all of them again after a resume that removed some
add(records)    the next records
flush()         nothing more to read for now: show what there is
close()         following ends
"""
