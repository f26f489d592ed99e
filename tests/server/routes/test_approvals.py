"""Questions over HTTP: listed in pages that follow each other, whatever is answered meanwhile."""

from __future__ import annotations

from penstock.hosting.ports import ApprovalRecord
from tests.server.served import Served, served


async def start_questions(server: Served, count: int, owner: str = "ann") -> list[str]:
    """So many questions of one run, two at a time; their ids, the oldest first."""
    ids = [f"{owner}-{number:02}" for number in range(count)]
    for number, id in enumerate(ids):
        question = ApprovalRecord(id, f"run-of-{owner}", owner, f"k{number}", "n", "?", asked_ms=number // 2)
        await server.stores.approvals.ask(question)
    return ids


async def test_approvals_are_listed_in_pages() -> None:
    async with served() as server, server.client("ann") as ann:
        ids = await start_questions(server, 12)
        await start_questions(server, 3, "bob")
        seen: list[str] = []
        place: dict[str, str] = {}
        for _ in range(4):
            page = (await ann.get("/api/approvals", params={"limit": 3, **place})).json()
            seen += [one["id"] for one in page["approvals"]]
            place = {"before": page["next"]}
        assert (seen, page["next"]) == (ids, None)
        assert (await ann.get("/api/approvals", params={"before": ids[-1]})).json() == {"approvals": [], "next": None}


async def test_a_page_continues_after_an_approval_that_was_answered_meanwhile() -> None:
    async with served() as server, server.client("ann") as ann:
        ids = await start_questions(server, 4)
        page = (await ann.get("/api/approvals", params={"limit": 2})).json()
        for id in ids[:3]:
            assert (await ann.post(f"/api/approvals/{id}/approve")).status_code == 200
        rest = (await ann.get("/api/approvals", params={"limit": 2, "before": page["next"]})).json()
        assert ([one["id"] for one in rest["approvals"]], rest["next"]) == (ids[3:], None)
        query = f"state=approved&state=waiting&before={page['next']}"
        every = (await ann.get(f"/api/approvals?{query}")).json()
        assert [one["id"] for one in every["approvals"]] == ids[2:]


async def test_an_edit_that_the_tool_does_not_accept_is_refused_and_can_be_corrected() -> None:
    expects = {"tool": "pay", "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}}}
    question = ApprovalRecord("q", "r", "ann", "k", "n", "May pay run?", {"tool": "pay"}, expects=expects)
    async with served() as server, server.client("ann") as ann:
        await server.stores.approvals.ask(question)
        assert (await ann.get("/api/approvals/q")).json()["expects"] == expects
        for wrong in ("seven", [1], None, {"amount": "seven"}, {"tool": "mail", "arguments": {}}):
            answer = await ann.post("/api/approvals/q/edit", json={"answer": wrong})
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_value")
            assert "pay" in answer.json()["error"]["message"]
        mended = await ann.post("/api/approvals/q/edit", json={"answer": {"amount": 7}})
        assert (mended.status_code, mended.json()["state"], mended.json()["answer"]) == (200, "edited", {"amount": 7})
