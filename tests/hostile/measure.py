"""Prints what every hostile input costs: `python -m tests.hostile.measure [GLOB]`."""

import re
import sys
from fnmatch import fnmatch

from tests.hostile.corpus import CORPUS
from tests.hostile.harness import harness


def rows(glob: str):
    with harness() as machine:
        for item in CORPUS:
            if not fnmatch(item.name, glob):
                continue
            place = machine.build(item)
            outcome = machine.run(item, place)
            machine.remove(place)
            ids = dict.fromkeys(re.findall(r"\b[A-Z]{3}\d{3}\b(?= \S+ +(?:error|warning|note))", outcome.stdout))
            found = " ".join(ids) or (outcome.stderr.splitlines() or ["-"])[0][:60]
            yield item, outcome, found


def lines(glob: str):
    found = sorted(rows(glob), key=lambda row: -row[1].seconds)
    yield "| input | poses as | exit code | found | peak RSS, MiB | seconds |\n|---|---|---|---|---|---|"
    for item, outcome, ids in found:
        wrong = "" if outcome.code == item.code else " (!)"
        cost = f"{outcome.peak_mib:.0f} | {outcome.seconds:.2f}"
        yield f"| {item.name} | {item.poses_as} | {outcome.code}{wrong} | {ids.replace('|', '/')} | {cost} |"
    peak, total = max(row[1].peak_mib for row in found), sum(row[1].seconds for row in found)
    yield f"\n{len(found)} inputs, {total:.1f} s, at most {peak:.0f} MiB"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines(sys.argv[1] if len(sys.argv) > 1 else "*"))
