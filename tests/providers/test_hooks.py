"""Hooks stay where they are, and count each call once, also when others patch the same method."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock import contain, contained
from penstock.providers.hooks import HookFailed, Hooks, Patch, built_on
from penstock.testing.provider import FakeProviderServer

LIBRARY = """
class Transport:
    def send(self, request):
        return f"answer to {request}"

    async def asend(self, request):
        return f"answer to {request}"
"""


class Counted:
    """Two patches of a library that count the calls they handle, and the failures that came late."""

    def __init__(self, library: str) -> None:
        self.calls: list[Any] = []
        self.late: list[HookFailed] = []
        patches = (Patch(library, "Transport", "send", self._sync), Patch(library, "Transport", "asend", self._async))
        self.hooks = Hooks(patches, self.late.append)

    def _sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send(transport: Any, request: Any) -> Any:
            self.calls.append(request)
            return original(transport, request)

        return send

    def _async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def asend(transport: Any, request: Any) -> Any:
            self.calls.append(request)
            return await original(transport, request)

        return asend

    def counts(self, transport: Any) -> int:
        """How often one call is counted."""
        self.calls.clear()
        assert transport.send("a") == "answer to a"
        return len(self.calls)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"library_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = sys.meta_path
    yield name
    sys.meta_path = finders
    sys.modules.pop(name, None)


@pytest.fixture
def module(library: str) -> ModuleType:
    return importlib.import_module(library)


@pytest.fixture
def counted(library: str) -> Counted:
    return Counted(library)


def test_hooks_are_installed_once_however_often_and_by_however_many_threads(
    counted: Counted, module: ModuleType
) -> None:
    start = threading.Barrier(8)

    def install() -> None:
        start.wait()
        counted.hooks.install()

    threads = [threading.Thread(target=install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.hooks.install() == []
    assert counted.counts(module.Transport()) == 1


async def test_an_async_method_stays_one(counted: Counted, module: ModuleType) -> None:
    counted.hooks.install()
    assert await module.Transport().asend("a") == "answer to a"
    assert counted.calls == ["a"]


def visible(original: Callable[..., Any]) -> Callable[..., Any]:
    """Instrumentation that says what it wraps."""

    @functools.wraps(original)
    def send(*args: Any) -> Any:
        return original(*args)

    return send


def hiding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Instrumentation that does not."""

    def send(*args: Any) -> Any:
        return original(*args)

    return send


@pytest.mark.parametrize("instrument", [visible, hiding])
def test_instrumentation_before_and_after_ours_counts_each_call_once(
    counted: Counted, module: ModuleType, instrument: Callable[..., Any]
) -> None:
    transport = module.Transport
    transport.send = instrument(transport.send)
    for _ in range(3):
        counted.hooks.install()
        assert counted.counts(transport()) == 1
        transport.send = instrument(transport.send)
        assert counted.counts(transport()) == 1


async def test_instrumentation_of_an_async_method_counts_each_call_once(counted: Counted, module: ModuleType) -> None:
    for _ in range(3):
        counted.hooks.install()
        module.Transport.asend = hiding(module.Transport.asend)
        counted.calls.clear()
        assert await module.Transport().asend("a") == "answer to a"
        assert counted.calls == ["a"]


def test_a_call_that_a_method_makes_to_itself_is_another_call(counted: Counted, module: ModuleType) -> None:
    def retrying(transport: Any, request: Any) -> Any:
        return transport.send("again") if request == "a" else f"answer to {request}"

    module.Transport.send = retrying
    for _ in range(2):
        counted.hooks.install()
        counted.calls.clear()
        assert module.Transport().send("a") == "answer to again"
        assert counted.calls == ["a", "again"]
        module.Transport.send = hiding(module.Transport.send)


def test_what_is_wrapped_visibly_is_not_wrapped_again(counted: Counted, module: ModuleType) -> None:
    counted.hooks.install()
    module.Transport.send = instrumented = visible(module.Transport.send)
    counted.hooks.install()
    assert module.Transport.send is instrumented


@pytest.mark.parametrize("instrument", [visible, hiding])
def test_instrumentation_that_is_removed_again_leaves_ours(
    counted: Counted, module: ModuleType, instrument: Callable[..., Any]
) -> None:
    transport = module.Transport
    counted.hooks.install()
    before = transport.send
    transport.send = instrument(before)
    counted.hooks.install()
    transport.send = before
    assert counted.counts(transport()) == 1
    counted.hooks.install()
    assert counted.counts(transport()) == 1


def test_a_tool_that_puts_back_what_was_there_before_us_is_noticed_at_the_next_install(
    counted: Counted, module: ModuleType
) -> None:
    transport = module.Transport
    before = transport.send
    counted.hooks.install()
    assert counted.hooks.removed() == []
    transport.send = before
    assert counted.counts(transport()) == 0
    assert counted.hooks.removed() == [f"{module.__name__}.Transport.send"]
    counted.hooks.install()
    assert counted.counts(transport()) == 1
    assert counted.hooks.removed() == []


@pytest.mark.parametrize("instrument", [visible, hiding])
def test_a_tool_that_wraps_or_unwraps_our_method_has_not_removed_it(
    counted: Counted, module: ModuleType, instrument: Callable[..., Any]
) -> None:
    transport = module.Transport
    counted.hooks.install()
    ours = transport.send
    transport.send = instrument(ours)
    assert counted.hooks.removed() == []
    counted.hooks.install()
    transport.send = ours
    assert counted.hooks.removed() == []


def test_a_hook_that_is_removed_inside_a_block_is_reported_at_its_end() -> None:
    with contain(max_cost_usd=1) as run:
        with contained(run):
            ours = HTTPConnection.putrequest
        with pytest.warns(RuntimeWarning, match=r"HTTPConnection\.putrequest was removed") as warned, contained(run):
            HTTPConnection.putrequest = ours.__wrapped__  # type: ignore[method-assign, attr-defined]
        with contained(run):
            assert HTTPConnection.putrequest is not ours.__wrapped__  # type: ignore[attr-defined]
    assert len(warned) == 1
    assert "the hook of http.client.HTTPConnection.putrequest was removed inside a block" in run.explain()


def test_a_library_that_is_imported_later_is_hooked_when_it_is_imported(counted: Counted, library: str) -> None:
    assert counted.hooks.install() == []
    module = importlib.import_module(library)
    assert counted.counts(module.Transport()) == 1
    assert type(module.__loader__).__module__ == type(module.__spec__.loader).__module__ == "_frozen_importlib_external"


def test_the_finder_leaves_when_everything_is_imported(counted: Counted, library: str) -> None:
    before = list(sys.meta_path)
    counted.hooks.install()
    counted.hooks.install()
    assert len(sys.meta_path) == len(before) + 1
    importlib.import_module(library)
    assert sys.meta_path == before


def test_a_reloaded_library_is_hooked_again_at_the_next_install(counted: Counted, module: ModuleType) -> None:
    counted.hooks.install()
    importlib.reload(module)
    counted.hooks.install()
    assert counted.counts(module.Transport()) == 1


def test_other_finders_find_what_they_found_before(counted: Counted, library: str) -> None:
    class Delegating:
        """Asks every finder again, as tools do that wait for imports too."""

        busy = False
        found: list[str]

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if self.busy or name != library:
                return None
            self.busy = True
            self.found = [name]
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    class Asking:
        """Asks every other finder itself."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            others = [finder for finder in sys.meta_path if finder is not self]
            found = (finder.find_spec(name, path, target) for finder in others if name == library)
            return next((spec for spec in found if spec is not None), None)

    first, last = Delegating(), Delegating()
    sys.meta_path = [first, *sys.meta_path]
    counted.hooks.install()
    sys.meta_path = [last, Asking(), *sys.meta_path]
    module = importlib.import_module(library)
    assert counted.counts(module.Transport()) == 1
    assert first.found == last.found == [library]


def test_a_module_that_another_thread_is_importing_is_waited_for(
    counted: Counted, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = ModuleType("gate")
    gate.entered, gate.go = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gate", gate)
    (tmp_path / f"{library}.py").write_text("import gate\ngate.entered.set()\ngate.go.wait()\n" + LIBRARY)
    importlib.invalidate_caches()
    importing = threading.Thread(target=importlib.import_module, args=(library,))
    importing.start()
    gate.entered.wait()  # half imported: it has no Transport yet
    installing = threading.Thread(target=lambda: failures.extend(counted.hooks.install()))
    failures: list[HookFailed] = []
    installing.start()
    gate.go.set()
    importing.join()
    installing.join()
    assert failures == []
    assert counted.counts(sys.modules[library].Transport()) == 1


def test_a_library_without_the_method_is_named_with_its_version(counted: Counted, module: ModuleType) -> None:
    del module.Transport.send
    [failure] = counted.hooks.install()
    assert str(failure) == (
        f"requests of {module.__name__} (unknown version) cannot be contained: it has no"
        f" {module.__name__}.Transport.send; install another version of {module.__name__}"
    )


def test_a_hook_that_fails_at_the_import_is_reported_then(counted: Counted, library: str, tmp_path: Path) -> None:
    (tmp_path / f"{library}.py").write_text("class Client: pass\n")
    assert counted.hooks.install() == []
    importlib.import_module(library)
    assert [failure.patch.method for failure in counted.late] == ["send", "asend"]


PROGRAM = """
import sys, warnings
import httpx2
del httpx2.HTTPTransport.handle_request
from penstock import contain, contained
from penstock.providers.hooks import HookFailed
{body}
"""


def run(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_a_hook_that_cannot_be_installed_is_an_error_under_a_money_limit() -> None:
    shown = run(
        """
try:
    with contain(max_cost_usd=1) as run, contained(run):
        print("inside")
except HookFailed as error:
    print(error)
"""
    )
    assert shown.startswith(f"requests of httpx2 {importlib.import_module('httpx2').__version__} cannot be contained")


def test_without_a_money_limit_it_is_one_warning() -> None:
    shown = run(
        """
for _ in range(2):
    with contain(max_steps=1) as run, contained(run):
        print("inside")
"""
    )
    assert shown.count("RuntimeWarning: requests of httpx2") == 1
    assert shown.count("inside") == 2


def test_a_library_that_is_imported_under_a_money_limit_and_cannot_be_contained_is_not_imported() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import sys, types, importlib.abc, importlib.machinery
from penstock import contain, contained
from penstock.providers.hooks import HookFailed

class Other(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "httpx" else None
    def exec_module(self, module):
        module.HTTPTransport = type("HTTPTransport", (), {})

sys.meta_path.insert(0, Other())
with contain(max_cost_usd=1) as run, contained(run):
    try:
        import httpx
    except HookFailed as error:
        print(error.library, "httpx" in sys.modules)
""",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("httpx False\n", "")


@pytest.mark.parametrize("http_library", ["httpx2", "httpx"])
def test_a_client_is_built_on_the_library_of_its_http_client(http_library: str) -> None:
    theirs = type("AsyncClient", (), {"__module__": f"{http_library}._client"})
    client = ModuleType("client")
    client.DefaultAsyncHttpxClient = type("Default", (theirs,), {"__module__": "client._base"})  # type: ignore[attr-defined]
    assert built_on(client) == http_library


INSTRUMENTED = """
import asyncio, functools, http.client, aiohttp, httpcore2, httpx2
from penstock import contain, contained
from penstock.testing.provider import FakeProviderServer

PLACES = [
    (httpx2.HTTPTransport, "handle_request"),
    (httpcore2.ConnectionPool, "handle_request"),
    (http.client.HTTPConnection, "send"),
    (aiohttp.ClientSession, "_request"),
]
seen = 0

def instrument():
    for owner, name in PLACES:
        def wrapped(*args, _original=getattr(owner, name), **options):
            global seen
            seen += 1
            return _original(*args, **options)
        {wraps}
        setattr(owner, name, wrapped)

async def over_aiohttp(url, body):
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return await response.read()

def over_http_client(server, body):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", __import__("json").dumps(body))
    connection.getresponse().read()
    connection.close()

body = {{"model": "fake-1", "messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 50}}
with FakeProviderServer() as server:
    url = server.url + "/v1/chat/completions"
    instrument()
    for round in range(1, 4):
        with contain(prices=server.provider.prices) as run, contained(run), contained(run):
            httpx2.Client(verify=False).post(url, json=body)
            over_http_client(server, body)
            asyncio.run(over_aiohttp(url, body))
        instrument()
        spent = run.balance.spent_nanos * round == server.invoice.total_nanos
        print(run.balance.attempts, run.uncontained_requests, seen > 0, spent)
"""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("wraps", ["wrapped = functools.wraps(wrapped.__kwdefaults__['_original'])(wrapped)", "pass"])
def test_real_libraries_that_are_instrumented_before_and_after_ours_count_each_request_once(wraps: str) -> None:
    program = INSTRUMENTED.format(wraps=wraps)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "3 0 True True\n" * 3, done.stderr


IMPORTED_LATE = """
import asyncio, json, sys
from penstock import Price, contain, contained

LIBRARIES = {"aiohttp", "botocore", "http.client", "httpx", "httpx2", "lm15", "requests", "urllib3"}
assert LIBRARIES.isdisjoint(sys.modules), LIBRARIES & sys.modules.keys()
with contain(max_cost_usd=1, prices={"fake-1": Price(3, 15)}) as run, contained(run):
    from tests.providers.shapes import SHAPES
    from tests.providers.stack_calls import ASYNC, CHAT, SYNC, chat, over_botocore

    assert LIBRARIES <= sys.modules.keys()
    for send in SYNC:
        send(sys.argv[1] + CHAT, chat())
    for asend in ASYNC:
        asyncio.run(asend(sys.argv[1] + CHAT, chat()))
    over_botocore(sys.argv[1] + SHAPES["converse"].path, SHAPES["converse"].body)
    requests = len(SYNC) + len(ASYNC) + 1
print(json.dumps([requests, run.balance.attempts, run.uncontained_requests, run.balance.spent_nanos]))
"""


def test_real_libraries_that_are_imported_inside_a_block_are_contained() -> None:
    with FakeProviderServer() as server:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED_LATE, server.url], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        requests, attempts, uncontained, spent_nanos = json.loads(done.stdout)
        assert requests == attempts == len(server.requests)
        assert (uncontained, spent_nanos) == (0, server.invoice.total_nanos)


def test_a_method_without_the_parameter_that_is_needed_is_named(library: str, module: ModuleType) -> None:
    hooks, needy = (
        Hooks((Patch(library, "Transport", "send", lambda original: original, needs),), lambda _: None)
        for needs in ("request", "x")
    )
    assert hooks.install() == []
    [failure] = needy.install()
    assert f"it has no {library}.Transport.send(x=…);" in str(failure)
    module.Transport.send = lambda *args, **options: None  # as other tools wrap it: it takes whatever comes
    assert needy.install() == []
