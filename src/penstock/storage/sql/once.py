"""Long outputs of runs, kept once.

What a run came to is told in its last event, and stands in its record and in its journal as well. A long output is kept
in the event alone, which goes when the run goes; in the other places there is a mark, with the seq of the event. A mark
stands between characters that JSON writes as escapes, so that nothing else that is kept looks like one. Whoever reads
is given the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from penstock.storage.databases.port import Row, Transaction, marks

SHORT = 200
"""Outputs that are no longer than this are kept wherever they stand."""
BEGINS = '{"output":'
"""How the data of an event begins that can be pointed at."""
MARK = re.compile("\x01([0-9]{1,18})\x01")
AT_ONCE = 50
"""So many events are looked for in one statement."""

SELECT_LAST = "SELECT seq, data FROM events WHERE run_id = ? ORDER BY seq DESC LIMIT 1"
SELECT = "SELECT run_id, seq, data FROM events"
LEAVE_OUT = "UPDATE journal SET value = replace(value, ?, ?) WHERE run_id = ? AND value <> replace(value, ?, ?)"

_end_of = json.JSONDecoder().raw_decode


def is_short(output: object) -> bool:
    """Whether no journal is looked through for it; of what is made of parts, nobody knows without writing it down."""
    if isinstance(output, str):
        return len(output) <= SHORT and len(json.dumps(output)) <= SHORT
    return output is None or isinstance(output, int | float)


async def left_out(transaction: Transaction, run_id: str, output: str) -> str:
    """What is kept of the output of a run that is complete; it is left out of the run's journal, too."""
    row = await transaction.row(SELECT_LAST, run_id) if len(output) > SHORT else None
    if row is None or not _tells(row[1], output):
        return output
    mark = f"\x01{row[0]}\x01"
    await transaction.run(LEAVE_OUT, output, mark, run_id, output, mark)
    return mark


async def whole(transaction: Transaction, kept: Sequence[tuple[str, str]]) -> list[str]:
    """The texts as they were, each kept for the run that stands before it; a mark that leads nowhere stays."""
    wanted = sorted({(run_id, int(seq)) for run_id, text in kept if "\x01" in text for seq in MARK.findall(text)})
    if not wanted:
        return [text for _, text in kept]
    outputs = {(run_id, seq): _output(data) for run_id, seq, data in await _events(transaction, wanted)}
    return [_filled_in(outputs, run_id, text) for run_id, text in kept]


def _filled_in(outputs: Mapping[tuple[str, int], str | None], run_id: str, text: str) -> str:
    return MARK.sub(lambda found: outputs.get((run_id, int(found[1]))) or found[0], text)


async def _events(transaction: Transaction, wanted: Sequence[tuple[str, int]]) -> list[Row]:
    """These events, and perhaps some others of the same runs."""
    found: list[Row] = []
    for first in range(0, len(wanted), AT_ONCE):
        runs, seqs = zip(*wanted[first : first + AT_ONCE], strict=True)
        where = f"run_id IN ({marks(len(runs))}) AND seq IN ({marks(len(seqs))})"
        found += await transaction.rows(f"{SELECT} WHERE {where}", *runs, *seqs)
    return found


def _tells(data: str, output: str) -> bool:
    return data.startswith(f"{BEGINS}{output}") and data[len(BEGINS) + len(output)] in ",}"


def _output(data: str) -> str | None:
    """The output in the data of an event, as it is written; None if there is none that can be read."""
    try:
        _, end = _end_of(data, len(BEGINS))
    except (ValueError, RecursionError):
        return None
    return data[len(BEGINS) : end] if data.startswith(BEGINS) else None
