"""The folder of one run: what it was told, what it measured, where it stands.

    config.json     the settings, re-runnable as they are
    code.json       run hash, git commit, and the versions and digests that entered the hash
    metrics.jsonl   one line a step; figures are made from it alone
    timing.jsonl    seconds and wall-clock times, which differ from run to run and live only here
    checkpoint/     state.safetensors: all that the next step needs, replaced every few steps
    result.json     one line, written last: a run that has it is finished

Equal hash means byte-identical ``metrics.jsonl``, interrupted or not. A checkpoint records how long
the two logs were; a resumed run cuts them back to that length and redoes the steps after it. So a
kill at any moment costs time only. Files are replaced as a whole (``treestore.atomic_file``); while
a folder is being made, ``config.json`` comes last and makes it a run.

``folder`` writes, ``records`` is the JSON in and out, ``ownership`` says whose a folder is.
"""

from mismatch_sim.runlog.folder import RunFolder as RunFolder
from mismatch_sim.runlog.ownership import find_run as find_run
from mismatch_sim.runlog.records import read_metrics as read_metrics
from mismatch_sim.runlog.records import read_result as read_result
from mismatch_sim.runlog.records import to_json as to_json
