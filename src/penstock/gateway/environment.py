"""The environment of a contained program: the gateway's addresses and a key of the gateway, and no provider's key.

Clients read different variables for the same thing, and some take precedence over others: the variables that clients
document are set, and those that would override them are removed. Variables with credentials of model providers are
removed, and so is every variable that contains a key of an upstream, whatever its name.

Knows names of variables, and nothing of processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

_REMOVED = frozenset(
    {
        *("OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS", "AZURE_OPENAI_ENDPOINT", "AZURE_API_BASE"),
        *("ANTHROPIC_API_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_IDENTITY_TOKEN"),
        *("ANTHROPIC_BEDROCK_BASE_URL", "ANTHROPIC_VERTEX_BASE_URL", "ANTHROPIC_FOUNDRY_BASE_URL"),
        *("CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_ENTERPRISE"),
        *("GOOGLE_VERTEX_BASE_URL", "VERTEXAI_PROJECT", "HUGGING_FACE_HUB_TOKEN", "VERCEL_OIDC_TOKEN"),
    }
)
"""Credentials that do not follow the usual pattern, and variables that would override those that are set."""
_REMOVED_PREFIXES = ("AWS_",)
_VENDORS = (
    "ai21 ai_gateway aiml aleph_alpha alephalpha amazon_nova anthropic anthropic_aws anthropic_foundry anyscale ark"
    " azure azure_ad azure_ai azure_openai azure_openai_ad azure_speech baseten bedrock_mantle bfl black_forest_labs"
    " bytez cerebras chutes clarifai co codestral cohere cometapi compactifai dashscope databricks datarobot deepgram"
    " deepinfra deepseek edenai elevenlabs empower fal fal_ai featherless featherless_ai fireworks fireworks_ai"
    " fireworksai friendli friendliai galadriel gigachat google_generative_ai gradient_ai groq hf huggingface"
    " hyperbolic inception infinity jina jina_ai lambda litellm litellm_proxy llama manus maritalk meta minimax mistral"
    " mistral_azure modelscope moonshot morph nanogpt nebius nlp_cloud novita nscale nvidia nvidia_nim nvidia_riva"
    " ollama openrouter or ovhcloud palm perplexity perplexityai poe predibase publicai qwen_ai_platform qwencloud"
    " recraft replicate runwayml sambanova soniox stability synthetic tencent together together_ai togetherai topaz v0"
    " vercel_ai_gateway vertex vertexai volcengine voyage voyage_ai watsonx wx xai xinference zai zhipuai"
)
_CREDENTIAL = re.compile(
    rf"(?:{'|'.join(_VENDORS.upper().split())})"
    r"_(?:(?:API_|AUTH_|ACCESS_|MASTER_)?(?:KEY|TOKEN)|APIKEY|API_SECRET|CREDENTIALS)"
)
"""Names of variables in which clients look for the key of a provider."""
_LOOPBACK = ("127.0.0.1", "localhost")


def child_environment(
    environ: Mapping[str, str],
    url: str,
    key: str,
    codex_home: Path,
    *,
    secrets: Iterable[str] = (),
    kept: Collection[str] = (),
) -> dict[str, str]:
    """Return the environment of the program: `environ`, with the gateway at `url` in place of every provider.

    `secrets` are the keys of the upstreams; `kept` are variables to keep that would otherwise be removed.
    """
    keys = [secret for secret in secrets if secret]
    passed = {
        name: value
        for name, value in environ.items()
        if (name in kept or not _is_removed(name)) and not any(secret in value for secret in keys)
    }
    return passed | _addresses(url) | _keys(key) | _no_proxy(environ) | {"CODEX_HOME": str(codex_home)}


def _is_removed(name: str) -> bool:
    plain = name.removesuffix("_FILE")
    if plain in _REMOVED or name.startswith(_REMOVED_PREFIXES) or _CREDENTIAL.fullmatch(plain):
        return True
    return plain != name and plain in _keys("")


def _addresses(url: str) -> dict[str, str]:
    openai = f"{url}/openai/v1"
    return {
        "PENSTOCK_GATEWAY_URL": url,
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,  # read by LangChain and aider
        "ANTHROPIC_BASE_URL": f"{url}/anthropic",
        "GOOGLE_GEMINI_BASE_URL": f"{url}/gemini",
        "GEMINI_API_BASE": f"{url}/gemini/v1beta",  # read by LiteLLM, which adds no version
    }


def _keys(key: str) -> dict[str, str]:
    names = ("OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY")
    return dict.fromkeys((*names, "PENSTOCK_GATEWAY_KEY"), key)


def _no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep requests to the gateway away from a proxy of the network."""
    named = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*filter(None, map(str.strip, named.split(","))), *_LOOPBACK]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def write_codex_home(folder: Path, url: str, key: str) -> None:
    """Write the configuration of codex, which reads neither the address nor, once logged in, the key from variables."""
    (folder / "config.toml").write_text(f"openai_base_url = {json.dumps(f'{url}/openai/v1')}\n", "utf-8")
    login = folder / "auth.json"
    login.touch(0o600)
    login.write_text(json.dumps({"OPENAI_API_KEY": key}), "utf-8")
