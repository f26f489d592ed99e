"""Recognise model requests by method, host and path.

A path that no other service has is recognised at every host, so that proxies and local servers count too. At the
hosts of known providers every other POST is a model request of unknown cost, except the paths that are free. An address
to which a model request was redirected is recognised from then on: clients follow a redirect with the same body.

Knows names of hosts and paths, and nothing of bodies, prices or limits.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal
from urllib.parse import unquote, urljoin, urlsplit

Api = Literal[
    "chat",
    "responses",
    "messages",
    "completions",
    "embeddings",
    "images",
    "speech",
    "transcriptions",
    "gemini",
    "converse",
    "invoke",
    "ollama",
    "unknown",
]
Output = Literal["text", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class Form:
    """The request format of one API."""

    api: Api
    marks: tuple[str, ...] = ()
    """A body with one of these fields is of this form; "a+b" are two fields that it must have together."""
    caps: tuple[str, ...] = ()
    """Fields that limit the output, nested ones with dots."""
    output: Output = "text"
    """Kind of the billed output: text that the caps limit, nothing, or output that cannot be estimated."""
    default_cap: int | None = None
    """Maximum output that the provider applies to a request that sets none; None if it applies no small one."""
    streams: bool | None = None
    """Whether the path asks for a stream; None if the field `stream` of the body does."""
    model: str = ""
    """The model that the path names; empty if the body names it."""
    deployment: str = ""
    """The deployment that a path of Azure names: the model, if the body names none."""
    default_model: str = ""
    """The model that the provider uses if the request names none."""
    path: str = ""
    """Path of a request of unknown cost."""
    is_provider: bool = False
    """Whether the host is a known provider's: then a body that cannot be read is a request of unknown cost."""


_CHAT = Form("chat", ("messages",), ("max_completion_tokens", "max_tokens"))
_MESSAGES = Form("messages", ("max_tokens", "model+messages"), ("max_tokens",))
_COMPLETIONS = Form("completions", ("prompt",), ("max_tokens",))
_OLLAMA = Form("ollama", ("model",), ("options.num_predict",))
_TRANSCRIPTIONS = Form("transcriptions", ("model",), output="unknown")
_IMAGES = Form("images", ("prompt", "image"), output="unknown", default_model="dall-e-2")
_GEMINI = Form(
    "gemini",
    ("contents",),
    (
        "generationConfig.maxOutputTokens",
        "generationConfig.max_output_tokens",
        "generation_config.maxOutputTokens",
        "generation_config.max_output_tokens",
    ),
    streams=False,
)
_CONVERSE = Form("converse", ("messages",), ("inferenceConfig.maxTokens",), streams=False)
_INVOKE = Form(
    "invoke",
    ("anthropic_version", "messages", "prompt", "inputText", "texts"),
    (
        "max_tokens",
        "max_tokens_to_sample",
        "max_gen_len",
        "textGenerationConfig.maxTokenCount",
        "inferenceConfig.maxTokens",
        "inferenceConfig.max_new_tokens",
    ),
    streams=False,
)
UNKNOWN = Form("unknown", output="unknown")

FORMS: tuple[tuple[str, Form], ...] = (
    ("/chat/completions", _CHAT),
    ("/agents/completions", _CHAT),
    ("/fim/completions", _COMPLETIONS),
    ("/completions", replace(_COMPLETIONS, default_cap=16)),
    ("/responses", Form("responses", ("model", "prompt"), ("max_output_tokens",))),
    ("/messages", _MESSAGES),
    ("/api/embeddings", Form("embeddings", ("prompt", "input"), output="none", streams=False)),
    ("/embeddings", Form("embeddings", ("input",), output="none", streams=False)),
    ("/images/generations", _IMAGES),
    ("/images/edits", _IMAGES),
    ("/images/variations", _IMAGES),
    ("/audio/speech", Form("speech", ("input",), output="unknown")),
    ("/audio/transcriptions", _TRANSCRIPTIONS),
    ("/audio/translations", _TRANSCRIPTIONS),
    ("/api/chat", _OLLAMA),
    ("/api/generate", _OLLAMA),
    ("/api/embed", Form("embeddings", ("input",), output="none", streams=False)),
)
"""Endings of paths, tried from top to bottom."""
_ENDINGS = tuple(ending for ending, _ in FORMS)

_VERBS: Mapping[str, Form] = MappingProxyType(
    {
        "generateContent": _GEMINI,
        "streamGenerateContent": replace(_GEMINI, streams=True),
        "embedContent": Form("embeddings", ("content",), output="none", streams=False),
        "batchEmbedContents": Form("embeddings", ("requests",), output="none", streams=False),
        "rawPredict": replace(_MESSAGES, streams=False),
        "streamRawPredict": replace(_MESSAGES, streams=True),
        "converse": _CONVERSE,
        "converse-stream": replace(_CONVERSE, streams=True),
        "invoke": _INVOKE,
        "invoke-with-response-stream": replace(_INVOKE, streams=True),
    }
)
"""Forms of paths that name the model, by the part of the path after the name."""
_MODEL_PATH = re.compile(
    r"/(?:models|tunedModels|endpoints)/([^/]+):(generateContent|streamGenerateContent|embedContent|batchEmbedContents)$"
    r"|/publishers/anthropic/models/([^/]+):(rawPredict|streamRawPredict)$"
    r"|/model/(.+)/(converse|converse-stream|invoke|invoke-with-response-stream)$"
)
_DEPLOYMENT = re.compile(r"/deployments/([^/]+)/")

PROVIDER_HOSTS = frozenset(
    {
        "api.openai.com",
        "api.anthropic.com",
        "generativelanguage.googleapis.com",
        "aiplatform.googleapis.com",
        "api.mistral.ai",
        "codestral.mistral.ai",
        "api.cohere.com",
        "api.cohere.ai",
        "api.groq.com",
        "openrouter.ai",
        "api.deepseek.com",
        "api.x.ai",
        "api.together.xyz",
        "api.together.ai",
        "api.fireworks.ai",
        "api.perplexity.ai",
        "api.cerebras.ai",
        "api.sambanova.ai",
        "api.ai21.com",
        "api.voyageai.com",
        "api.jina.ai",
        "api.replicate.com",
        "api.deepinfra.com",
        "api.hyperbolic.xyz",
        "api.novita.ai",
        "api.moonshot.ai",
        "api.moonshot.cn",
        "api.minimax.io",
        "api.z.ai",
        "open.bigmodel.cn",
        "dashscope.aliyuncs.com",
        "dashscope-intl.aliyuncs.com",
        "integrate.api.nvidia.com",
        "router.huggingface.co",
        "api-inference.huggingface.co",
        "models.github.ai",
        "models.inference.ai.azure.com",
        "ollama.com",
    }
)
"""Hosts at which every POST may be billed."""
PROVIDER_SUFFIXES = (
    ".api.openai.com",
    ".openai.azure.com",
    ".services.ai.azure.com",
    ".models.ai.azure.com",
    ".cognitiveservices.azure.com",
    "-aiplatform.googleapis.com",
    ".inference.ai.azure.com",
)
_AWS_SUFFIXES = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

_FREE = re.compile(
    r"/(?:moderations|count[_-]tokens|input_tokens|tokenize|detokenize|cancel|check-api-key|uploads|"
    r"uploads/[^/]+/(?:parts|complete)|threads|threads/[^/]+/messages|conversations|conversations/[^/]+/items)$"
    r"|:(?:countTokens|computeTokens|cancel)$"
    r"|^/upload/"
)
"""Paths of providers that cost nothing themselves."""
_MODEL_SOCKET = re.compile(r"/(?:v\d\w*|openai)/(?:responses|realtime|live/sessions)(?:/|$)|\.BidiGenerateContent\w*$")
"""Paths at which model APIs take requests over a WebSocket."""
_SDK = "x-stainless-lang"
MAX_REDIRECTED = 256
_redirected: OrderedDict[tuple[str, str], Form] = OrderedDict()
"""Forms of the hosts and paths to which model requests were redirected, oldest first; no lock, as each operation on it
is atomic."""


def form_of(method: str, host: str, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> Form | None:
    """Return the form of the model request with this method and address; None if it is no model request, or a free one.

    `headers` identify the official clients: their POSTs to unknown paths are requests of unknown cost at every host.
    """
    if method.upper() != "POST":
        return None
    path = _normalized(path)
    is_provider = is_provider_host(host)
    form = _by_model(path) or _by_ending(path)
    if form is None and _redirected:
        form = _redirected.get((_name(host), path))
    if form is not None and not _FREE.search(path):
        return replace(form, is_provider=True, path=path) if is_provider else form
    if not (is_provider or _SDK in headers) or _FREE.search(path):
        return None
    return replace(UNKNOWN, path=path, is_provider=True)


def is_model_socket(host: str, path: str) -> bool:
    """Whether a WebSocket that is opened there carries model requests."""
    return is_provider_host(host) or _MODEL_SOCKET.search(_normalized(path)) is not None


def note_redirect(form: Form, host: str, path: str, location: str) -> None:
    """Recognise requests to `location`, to which a request of this form to this host and path was redirected."""
    try:
        target = urlsplit(urljoin(path, location))
        address = _name(target.hostname or host), _normalized(target.path)
    except ValueError:  # it is no address, and no client follows it
        return
    _redirected[address] = form
    if len(_redirected) > MAX_REDIRECTED:
        _redirected.popitem(last=False)


def is_provider_host(host: str) -> bool:
    """Whether the host, with or without its port, is one of a known model provider."""
    host = _name(host)
    if host in PROVIDER_HOSTS or host.endswith(PROVIDER_SUFFIXES):
        return True
    return "bedrock" in host and host.endswith(_AWS_SUFFIXES)


def _name(host: str) -> str:
    """Return the name of the host, without its port."""
    return host.partition(":")[0].lower().rstrip(".")


def _normalized(path: str) -> str:
    return unquote(path.partition("?")[0]).rstrip("/")


def _by_model(path: str) -> Form | None:
    found = _MODEL_PATH.search(path)
    if found is None:
        return None
    model, verb = (group for group in found.groups() if group is not None)
    return replace(_VERBS[verb], model=model)


def _by_ending(path: str) -> Form | None:
    if not path.endswith(_ENDINGS):  # one call for the paths of everything else
        return None
    form = next(form for ending, form in FORMS if path.endswith(ending))
    deployment = _DEPLOYMENT.search(path)
    return form if deployment is None else replace(form, deployment=deployment[1])
