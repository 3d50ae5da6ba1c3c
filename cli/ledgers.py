"""The block ledgers of all workers, as their admin ports tell them: `baton status --blocks`."""

import json
import urllib.request
from collections import Counter
from typing import Any

from rich.table import Table

from cli.output import print_json, print_plain, print_text
from common.errors import Unavailable

_CALL_S = 10.0
_COLUMNS = ("block", "gen", "state", "held by", "request", "age")


def show_ledgers(admins: dict[str, str], token: str, as_json: bool) -> None:
    """``admins``: admin address by worker id. Raises Unavailable where one does not answer."""
    ledgers = {worker: _ledger(_page(admin, token)) for worker, admin in admins.items()}
    if as_json:
        print_json({"workers": ledgers})
        return
    for worker, ledger in ledgers.items():
        print_text(_sum(worker, ledger) + "\n")
        if ledger["blocks"]:
            print_plain(_table(ledger))


def _page(admin: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{admin}/debug/kv", headers={"authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_CALL_S) as response:
            page: dict[str, Any] = json.load(response)
    except OSError as error:
        raise Unavailable(f"the admin port {admin} does not answer: {error}") from None
    return page


def _ledger(page: dict[str, Any]) -> dict[str, Any]:
    """Every reference to a block that is not free, and the conservation sum: ``conserved`` says
    whether the states add up to the total."""
    ledger = page["ledger"]
    counts = ledger["counts"]
    requests = {owner: entry["request_id"] for owner, entry in page["sequences"].items()}
    for block in ledger["blocks"]:
        for reference in block["references"]:
            reference["request_id"] = requests.get(str(reference["owner_id"]), "")
    return {
        "counts": counts,
        "conserved": sum(counts.values()) == 2 * counts["total"],
        "leaked": ledger["leaked"],
        "blocks": ledger["blocks"],
    }


def _sum(worker: str, ledger: dict[str, Any]) -> str:
    """The line that says it all: what adds up to what."""
    counts = dict(ledger["counts"])
    total = counts.pop("total")
    terms = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    sign = "=" if ledger["conserved"] else "IS NOT"
    return f"{worker}: {terms} {sign} {total} blocks; {ledger['leaked']} leaked"


def _table(ledger: dict[str, Any]) -> Table:
    """One line a referenced block; of the cached ones, which nobody holds, how many."""
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, header_style="bold")
    for block in ledger["blocks"]:
        for reference in block["references"]:
            table.add_row(
                str(block["block_id"]),
                str(block["generation"]),
                block["state"].replace("_", " "),
                f"{reference['kind']} {reference['owner_id']}",
                reference["request_id"],
                f"{reference['age_s']:.1f} s",
            )
    unheld = Counter(block["state"] for block in ledger["blocks"] if not block["references"])
    for state, count in unheld.items():
        table.add_row(f"{count} more", "", state)
    return table
